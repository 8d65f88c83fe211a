"""One life of the default process group: made or joined, held, ended by its last holder."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist

from distctx import _torch
from distctx.devices import (
    binds_device,
    check_backend,
    choose_device,
    current_device,
    default_backend,
    device_type_of,
    same_backend,
    use_device,
)
from distctx.environment import LaunchEnvironment, is_env
from distctx.exceptions import (
    GroupConflictError,
    LaunchEnvironmentError,
    RuntimeStateError,
)
from distctx.layout import MeshLayout
from distctx.mesh_cache import MeshCache
from distctx.rendezvous import Meeting, meet
from distctx.request import Request
from distctx.stores import HashStore, PrefixStore, Store, open_store

__all__ = ["World", "find", "make"]

log = logging.getLogger("distctx")

#: Seconds that an abort may take before the groups are left to the end of the process.
_ABORT_BOUND = 30.0
#: Seconds that a clean end waits for peers that still connect to its groups.
_BUILD_BOUND = 2.0

_current: World | None = None


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

    turns: int = attrs.field(init=False, default=0)
    built_together: list[Meeting] = attrs.field(init=False, factory=list)
    _holders: list[object] = attrs.field(init=False, factory=list)
    _caches: dict[tuple[Any, ...], MeshCache] = attrs.field(init=False, factory=dict)
    _undo: contextlib.ExitStack = attrs.field(init=False, factory=contextlib.ExitStack)

    @property
    def is_alive(self) -> bool:
        """Whether this is still the default group: its owner may have destroyed it meanwhile."""
        return dist.is_initialized() and dist.group.WORLD is self.group

    @contextlib.contextmanager
    def meeting(self, purpose: str, wants: Mapping[str, Any], timeout: timedelta) -> Iterator[str]:
        """A block in which all ranks build the same; gives a word for it. Talks to every rank.

        Raises:
            RendezvousTimeoutError: some ranks did not come to it.
            RankDisagreementError: they came for different things.
        """
        if not self.is_alive:
            raise RuntimeStateError(
                "The process group of this runtime was destroyed by somebody else; close the "
                "runtime and open it again."
            )
        if self.store is None or self.world_size == 1:
            yield secrets.token_hex(4)
            return
        here = meet(
            PrefixStore("touch", self.store),
            self.rank,
            self.world_size,
            wants,
            timeout,
            place=self.place,
            purpose=purpose,
        )
        yield here.token
        here.report_built()
        self.built_together.append(here)

    def take_cache(self, layout: MeshLayout, device_type: str, request: Request) -> MeshCache:
        """What is built of a layout here, shared by all who ask for it with the same times."""
        timeout = request.timeout or self.timeout
        rendezvous_timeout = request.rendezvous_timeout or self.rendezvous_timeout
        key = (layout, device_type, timeout, rendezvous_timeout)
        if key not in self._caches:
            self._caches[key] = MeshCache(self, *key)
        return self._caches[key]

    def hold(self, holder: object, cache: MeshCache) -> None:
        """Keep this world, and what is built of a layout, until ``leave``."""
        global _current
        self._holders.append(holder)
        cache.holders += 1
        _current = self

    def would_end_with(self, holder: object) -> bool:
        """Whether this world ends when ``holder`` leaves."""
        return self.owned and self._holders == [holder]

    def leave(self, holder: object, cache: MeshCache, *, abort: bool) -> None:
        """Let go. The last holder ends a world that distctx made; of another's, only the sub-groups
        made here go. Talks to nobody."""
        global _current
        ends = self.would_end_with(holder)
        self._holders.remove(holder)
        cache.holders -= 1
        if not abort and (ends or cache.holders == 0):
            self._wait_until_built()
        if cache.holders == 0:
            self._caches = {key: one for key, one in self._caches.items() if one is not cache}
            made = cache.forget()
            if self.is_alive and not ends:
                _torch.end_groups(made, abort=abort and "nccl" in self.backend)
        if self._holders:
            return
        if _current is self:
            _current = None
        with self._undo:
            if ends and self.is_alive:
                _end(self.backend, abort)

    def _wait_until_built(self) -> None:
        """No group goes while a peer still connects to it: long past, but in the shortest lives."""
        end = time.monotonic() + _BUILD_BOUND
        with contextlib.suppress(RuntimeError):  # the store has gone, and so has its server's rank
            for here in self.built_together:
                here.wait_until_built(self.world_size, end)
        self.built_together.clear()


def find(request: Request) -> World | None:
    """The world that is there already, checked against ``request``; None where there is none.

    Talks to nobody.

    Raises:
        GroupConflictError: it is not what was asked for.
    """
    if not dist.is_initialized():
        return None
    known = _current is not None and _current.is_alive
    world = _current if known and _current is not None else _adopt(request)
    _check(world, request)
    return world


def make(request: Request, environment: LaunchEnvironment, layout: MeshLayout) -> World:
    """Start a world: choose the device, meet, make the default group. Talks to every rank.

    Raises:
        LaunchEnvironmentError: this host lacks the backend or the device; before any socket opens.
        RendezvousError: and what is below it; see ``meet``.
    """
    backend = request.backend or default_backend(request.device_type)
    check_backend(backend)
    device_type = request.device_type or device_type_of(backend)
    timeout = request.timeout or _torch.default_timeout(backend)
    rendezvous_timeout = request.rendezvous_timeout or timeout
    choose = functools.partial(choose_device, device_type, asked=request.device, backend=backend)
    early = environment.local_rank is not None or device_type == "cpu" or request.device is not None
    device = choose(environment.local_rank) if early else None
    if backend == "fake" or (
        environment.world_size == 1 and request.store is None and is_env(request.init_method)
    ):
        meeting = None
        store: Store = _torch.fake_store() if backend == "fake" else HashStore()
        place = "this process"
    else:
        meeting, place = _meet_to_start(
            request, environment, layout, backend, device_type, timeout, rendezvous_timeout
        )
        store = PrefixStore("group", meeting.store)
        if meeting.local is not None:
            local_rank, local_world_size = meeting.local
            environment = attrs.evolve(
                environment, local_rank=local_rank, local_world_size=local_world_size
            )
    device = device or choose(environment.local_rank)
    arguments: dict[str, Any] = {
        "backend": backend,
        "store": store,
        "rank": environment.rank,
        "world_size": environment.world_size,
        "timeout": timeout,
    }
    if request.pg_options is not None:
        arguments["pg_options"] = request.pg_options
    if binds_device(backend, device):
        arguments["device_id"] = device
    with contextlib.ExitStack() as undo:
        undo.enter_context(use_device(device))
        _init(meeting.token if meeting else secrets.token_hex(4), arguments, undo)
        world = World(
            group=dist.group.WORLD,
            rank=environment.rank,
            world_size=environment.world_size,
            backend=backend,
            device=device,
            environment=environment,
            owned=True,
            timeout=timeout,
            rendezvous_timeout=rendezvous_timeout,
            store=meeting.store if meeting else None,
            place=place,
        )
        world._undo = undo.pop_all()
    if meeting is not None:
        meeting.report_built()
        world.built_together.append(meeting)
    return world


def _meet_to_start(
    request: Request,
    environment: LaunchEnvironment,
    layout: MeshLayout,
    backend: str,
    device_type: str,
    timeout: timedelta,
    rendezvous_timeout: timedelta,
) -> tuple[Meeting, str]:
    """The meeting before a world is made, and the place of its store in words."""
    if request.store is None:
        store, place = open_store(environment, request.init_method, rendezvous_timeout)
        store.set_timeout(timeout)
    else:
        store, place = request.store, f"the {type(request.store).__name__} that was given"
    meeting = meet(
        PrefixStore("distctx", store),
        environment.rank,
        environment.world_size,
        {
            "backend": backend,
            "device_type": device_type,
            "mesh_shape": list(layout.shape),
            "mesh_dim_names": list(layout.dim_names),
        },
        rendezvous_timeout,
        place=place,
        purpose="to start the world",
        need_local=environment.local_rank is None,
    )
    return meeting, place


def _init(token: str, arguments: dict[str, Any], undo: contextlib.ExitStack) -> None:
    """torch's own start, its group names moved on, its excepthook to be taken off again."""
    hook = sys.excepthook
    try:
        _torch.move_group_names(token)
        dist.init_process_group(**arguments)
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        _torch.move_group_names("")
        sys.excepthook = hook
        raise
    undo.callback(_put_back_excepthook, hook, sys.excepthook)


def _put_back_excepthook(before: Any, torchs: Any) -> None:
    """torch wraps the hook at each start and never unwraps it. One that came later is left
    alone."""
    if sys.excepthook is torchs:
        sys.excepthook = before


def _end(backend: str, abort: bool) -> None:
    """End the default group. With NCCL, a failing rank aborts: destroying can wait for its
    peers."""
    if abort and "nccl" in backend:
        if not _torch.abort_world(_ABORT_BOUND):
            log.warning(
                "the NCCL groups could not be aborted within %g s; left alone", _ABORT_BOUND
            )
        return
    dist.destroy_process_group()


def _adopt(request: Request) -> World:
    """A default group that is there already, made by somebody else. Talks to nobody."""
    group = dist.group.WORLD
    backend = str(dist.get_backend(group))
    if backend in ("undefined", "custom"):
        backend = dist.get_backend_config(group)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        environment = LaunchEnvironment.detect(
            rank=rank, world_size=world_size, needs_address=False
        )
    except LaunchEnvironmentError:
        environment = LaunchEnvironment("none", rank, world_size)
    device_type = request.device_type or device_type_of(backend)
    bound = getattr(group, "bound_device_id", None)
    if request.device is not None:
        device = request.device
    elif bound is not None and bound.type == device_type:
        device = bound
    else:
        device = current_device(device_type)
    timeout = request.timeout or _torch.group_timeout(group) or _torch.default_timeout(backend)
    store = _torch.default_store() if backend != "fake" else None
    return World(
        group=group,
        rank=rank,
        world_size=world_size,
        backend=backend,
        device=device,
        environment=environment,
        owned=False,
        timeout=timeout,
        rendezvous_timeout=request.rendezvous_timeout or timeout,
        store=None if store is None else PrefixStore("distctx", store),
        place="the store of the group that was there",
    )


def _check(world: World, request: Request) -> None:
    """Hold a world that is there against what was asked for."""
    wrong = [
        f"{name}: got {got!r}, wanted {wanted!r}"
        for name, got, wanted in (
            ("world_size", world.world_size, request.world_size),
            ("rank", world.rank, request.rank),
        )
        if wanted is not None and wanted != got
    ]
    if request.backend is not None and not same_backend(request.backend, world.backend):
        wrong.append(f"backend: got {world.backend!r}, wanted {request.backend!r}")
    bound = getattr(world.group, "bound_device_id", None) or (world.device if world.owned else None)
    if request.device is not None and bound is not None and request.device != bound:
        wrong.append(f"device: got {str(bound)!r}, wanted {str(request.device)!r}")
    if wrong:
        raise GroupConflictError(
            "The process group that is initialised already is not the one asked for; "
            + "; ".join(wrong)
            + ". Leave these arguments out to join it as it is, or destroy it first."
        )
