"""One life of the default process group: held by those who use it, ended by the last of them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist

from distctx import _torch
from distctx.bounded import run_bounded
from distctx.environment import LaunchEnvironment
from distctx.exceptions import DistctxError, RuntimeStateError
from distctx.layout import MeshLayout
from distctx.mesh_cache import MeshCache
from distctx.rendezvous import meet
from distctx.request import Request
from distctx.stores import PrefixStore, Store, wait_for_count

__all__ = ["Hold", "World", "current"]

log = logging.getLogger("distctx")

#: Seconds that an abort may take, and as long again a destroy that it frees.
_ABORT_BOUND = 30.0
#: Seconds that a clean end waits for peers that are not through yet.
_OTHERS_BOUND = 2.0

_current: World | None = None
_exiting = False


@attrs.define(eq=False, repr=False)
class World:
    """A default process group and everything that was built on it."""

    group: Any
    rank: int
    world_size: int
    backend: str
    device: torch.device
    environment: LaunchEnvironment
    owned: bool
    timeout: timedelta
    rendezvous_timeout: timedelta
    store: Store | None
    place: str
    #: Who serves the store, in words; empty where nobody does.
    server: str = ""

    #: Why nobody would come to a meeting now, in words; empty where they may.
    others_wait: str = attrs.field(init=False, default="")
    #: Lets go of those who wait at a breakpoint, if any do.
    leave: Callable[[], None] = attrs.field(init=False, default=lambda: None)
    #: The number of the last room in which the ranks met after the start.
    _met: int = attrs.field(init=False, default=0)
    to_be_read: list[tuple[Store, str, int]] = attrs.field(init=False, factory=list)
    _holds: list[Hold] = attrs.field(init=False, factory=list)
    _caches: dict[tuple[Any, ...], MeshCache] = attrs.field(init=False, factory=dict)
    undo: contextlib.ExitStack = attrs.field(init=False, factory=contextlib.ExitStack)

    @property
    def is_alive(self) -> bool:
        """Whether this is still the default group: its owner may have destroyed it meanwhile."""
        return dist.is_initialized() and dist.group.WORLD is self.group

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank to wait for: a world of 1, or a simulated one."""
        return self.world_size == 1 or self.backend == "fake"

    def require_alive(self) -> None:
        """Refuse to go on where somebody destroyed the group."""
        if not self.is_alive:
            raise RuntimeStateError(
                "The process group of this runtime was destroyed by somebody else; close the "
                "runtime and open it again."
            )

    @contextlib.contextmanager
    def meeting(self, purpose: str, wants: Mapping[str, Any], timeout: timedelta) -> Iterator[str]:
        """A block in which all ranks build the same; gives a word for it. Talks to every rank.

        Raises:
            RendezvousTimeoutError: some ranks did not come to it.
            RankDisagreementError: they came for different things.
            RuntimeStateError: the others wait at a breakpoint.
        """
        self.require_alive()
        if self.store is None or self.world_size == 1:
            yield secrets.token_hex(4)  # alike on all ranks only where there is one
            return
        if self.others_wait:
            raise RuntimeStateError(f"{self.others_wait} Nobody would come {purpose}.")
        here = meet(
            PrefixStore("touch", self.store),
            self.rank,
            self.world_size,
            wants,
            timeout,
            place=self.place,
            purpose=purpose,
            expected=self._met + 1,
        )
        self._met = here.number
        try:
            yield here.token
        except Exception as error:
            here.report_failure(self.rank, error)
            if isinstance(error, RuntimeError) and not isinstance(error, DistctxError):
                raise here.not_built("their groups", error) from error
            raise
        here.report_built()
        self.to_be_read.append((here.store, "built", self.world_size))

    def cache_of(self, layout: MeshLayout, device_type: str, request: Request) -> MeshCache:
        """What is built of a layout here, shared by all who ask for it with the same times."""
        timeout = request.timeout or self.timeout
        rendezvous_timeout = request.rendezvous_timeout or self.rendezvous_timeout
        key = (layout, device_type, timeout, rendezvous_timeout)
        if key not in self._caches:
            self._caches[key] = MeshCache(self, *key)
        return self._caches[key]

    def hold(self, cache: MeshCache) -> Hold:
        """Keep this world, and what is built of a layout, until the hold is released."""
        global _current
        hold = Hold(self, cache)
        self._holds.append(hold)
        _current = self
        return hold

    def release(self, hold: Hold, *, abort: bool) -> None:
        """End what nobody holds any more: sub-groups made here, a world that distctx made."""
        ends = hold.ends_the_world
        self._holds.remove(hold)
        unused = all(other.cache is not hold.cache for other in self._holds)
        try:
            if ends or unused:
                self._wait_for_others()
        finally:  # Ctrl-C ends the wait, and must leave nothing behind
            self._let_go(hold, ends=ends, unused=unused, abort=abort)

    def _let_go(self, hold: Hold, *, ends: bool, unused: bool, abort: bool) -> None:
        global _current
        if unused:
            self._caches = {k: one for k, one in self._caches.items() if one is not hold.cache}
            made = hold.cache.forget()
            _torch.forget_sharding()
            if self.is_alive and not ends:
                self._end_groups(
                    functools.partial(_torch.end_groups, made, abort=False),
                    functools.partial(_torch.end_groups, made, abort=True),
                    abort,
                )
        if not self._holds:
            if _current is self:
                _current = None
            self.end(abort=abort)

    def abandon(self, hold: Hold) -> None:
        """Take a hold off and end nothing: what was built may still be in use."""
        self._holds.remove(hold)

    def end(self, *, abort: bool) -> None:
        """End the process group if distctx made it, and undo what came with it."""
        with self.undo:
            self.leave()
            if self.owned and self.is_alive:
                self._end_groups(dist.destroy_process_group, _torch.abort_world, abort)
        # gloo closes its connections when nobody holds the group any more, and not before.
        self.group = None

    def _end_groups(
        self, destroy: Callable[[], None], kill: Callable[[], None], abort: bool
    ) -> None:
        """End groups. With NCCL in bounds: destroying waits for what still runs on the device, for
        at most the group's timeout; what failed is aborted at once, which waits for nobody."""
        if "nccl" not in self.backend:
            destroy()
            return
        if _exiting:  # no thread can be started any more, from Python 3.12 on
            kill()
            return
        destroyed = threading.Event()

        def destroy_and_tell() -> None:
            try:
                destroy()
            finally:
                destroyed.set()

        if not abort:
            timeout = self.timeout.total_seconds()
            try:
                return run_bounded(destroy_and_tell, timeout)
            except TimeoutError:
                log.warning("the NCCL groups were not destroyed within %g s", timeout)
        with contextlib.suppress(TimeoutError):
            run_bounded(kill, _ABORT_BOUND)
            # It frees the destroy that hung, which must not go on into the next life.
            if abort or destroyed.wait(_ABORT_BOUND):
                return
        log.warning("the NCCL groups were not aborted within %g s", _ABORT_BOUND)
        log.warning("the NCCL groups are left to the end of the process")

    def _wait_for_others(self) -> None:
        """Nothing goes that a peer still needs: a group it still connects to (it would be cut off:
        "connection closed by peer"), or a word it has not read. Both are long past but in the
        shortest lives, so this is one request each, and one bound for all."""
        waits, self.to_be_read = self.to_be_read, []
        end = time.monotonic() + _OTHERS_BOUND

        def wait() -> None:
            for store, key, number in waits:
                wait_for_count(store, key, number, end)

        if waits:
            with contextlib.suppress(TimeoutError):  # the store's server is stopped
                run_bounded(wait, _OTHERS_BOUND)


def _forget_after_fork() -> None:
    """A child has no part in its parent's world."""
    global _current
    if _current is not None:
        _torch.keep_groups_for_ever()
        _current = None


os.register_at_fork(after_in_child=_forget_after_fork)


@attrs.frozen(eq=False, repr=False)
class Hold:
    """One runtime's hold on a world and on what is built of its layout."""

    world: World
    cache: MeshCache
    _process: int = attrs.field(init=False, factory=os.getpid)

    @property
    def ends_the_world(self) -> bool:
        """Whether the world ends when this is released."""
        return self.world.owned and self.world._holds == [self]

    @property
    def is_here(self) -> bool:
        """Whether this is the process that opened it, and not a child of it."""
        return self._process == os.getpid()

    def release(self, *, abort: bool) -> None:
        """Let go; see ``World.release``. A child of the process that opened it only forgets it."""
        if self.is_here:
            self.world.release(self, abort=abort)

    def abandon(self) -> None:
        """Let go without ending anything; see ``World.abandon``."""
        if self.is_here:
            self.world.abandon(self)


def current() -> World | None:
    """The world that distctx knows here, where it is still there."""
    return _current if _current is not None and _current.is_alive else None


@atexit.register
def _end_at_exit() -> None:
    """The end of the interpreter ends a world that is still there, without waiting for anybody."""
    global _exiting
    _exiting = True
    if _current is not None:
        _current.end(abort=True)
