"""DistributedRuntime: one object that owns the distributed life of a process."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

import attrs

from distctx.exceptions import RuntimeStateError
from distctx.opened import Opened, State
from distctx.request import Request
from distctx.settings import open_runtimes

if TYPE_CHECKING:
    from distctx.display import Description
    from distctx.leaving import Farewell
    from distctx.world import Hold, World

__all__ = ["DistributedRuntime", "State"]

log = logging.getLogger("distctx")

#: Opening is one at a time, whichever thread does it.
_opening = threading.RLock()


def _was_dropped(hold: Hold, who: str) -> None:
    """A runtime has gone, or the interpreter ends, and nobody closed it. Its world stays for those
    who use it: the next runtime joins it, and the end of the interpreter ends it."""
    warnings.warn(
        f"A DistributedRuntime ({who}) was never closed; use it in a `with` block, or close() it.",
        ResourceWarning,
        stacklevel=2,
    )
    hold.abandon()


def _forget_after_fork() -> None:
    """A child must ask anew, and is then refused: groups are of no use without their threads."""
    global _opening
    _opening = threading.RLock()  # another thread of the parent may hold it
    for ref in open_runtimes:
        if (rt := ref()) is not None:
            rt._submeshes.clear()
            rt._groups.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


@contextlib.contextmanager
def _noted_on(error: BaseException, what: str) -> Iterator[None]:
    """A failure in here is a note on the error that is on its way already, and never in its
    place."""
    try:
        yield
    except Exception as failure:
        error.add_note(f"[distctx] and {what} failed: {type(failure).__name__}: {failure}")


@attrs.define(eq=False, repr=False)
class DistributedRuntime(Opened):
    """The distributed life of this process: who it is, its process group, its place in the mesh.

    Entering chooses the device and initialises the default process group, or joins the one that is
    there. The mesh is built when it is first asked for. Leaving undoes exactly what entering did.
    The same script runs under plain ``python`` (a world of 1), torchrun, srun or mpirun.

    Args:
        backend: None: nccl with CUDA, gloo without, from torch's own map of devices. Also
            ``"cpu:gloo,cuda:nccl"``, and ``"fake"`` for a world that communicates nothing.
        init_method: where the ranks meet, as torch takes it. None: from the launcher.
        rank: who this is. None: from the launcher.
        world_size: how many processes. None: from the launcher; without one, 1.
        device_type: None: follows the backend (``fake``: cpu).
        mesh_shape: the size of each mesh dim, one of which may be -1. None: inside an open runtime
            its layout and mesh, else all ranks in one dim.
        mesh_dim_names: a name for each dim. None: ``("dp",)`` for one, ``("dim_0", …)`` for more.
        dp_mesh_dim: the dim that splits the data, or a tuple of them. None: those named ``dp``,
            ``dp_replicate`` and ``dp_shard``.
        tp_mesh_dim: the dim that splits tensors. None: the one named ``tp``.
        sharded_by_data_parallel: False: every rank reads all the data; ``dp_partition`` is (1, 0).
        tensor_parallel_enabled: False: ``tp_size`` is 1.
        timeout: of every group, in seconds or as a timedelta. None: torch's default for the
            backend.
        rendezvous_timeout: how long ranks wait for each other to come. None: ``timeout``.
        store: a store to meet in, in place of ``init_method``.
        pg_options: handed on to ``init_process_group``.
        device: this process's device. None: by local rank; the one visible where only one is.

    Raises:
        LayoutError: shape, names or dims that cannot be.
        LaunchEnvironmentError: a time, a rank or a place to meet that cannot be.

    Example:
        >>> with DistributedRuntime(mesh_shape=(-1, 1), mesh_dim_names=("dp", "tp")) as rt:
        ...     rt.dp_partition, rt.tp_size, rt.coordinate
        (Partition(num_partitions=1, partition_index=0), 1, (0, 0))
    """

    _dropped: weakref.finalize[Any, DistributedRuntime] | None = attrs.field(
        init=False, default=None
    )
    # Begin and end.

    def open(self) -> DistributedRuntime:
        """Choose the device and make or join the default process group; returns self.

        Talks to every rank where it makes one; to none where it joins one.

        Raises:
            RuntimeStateError: it is open already.
            LaunchEnvironmentError: the launch is partly set or contradicts itself, or this host
                lacks the backend or the device. Before any socket opens.
            LayoutError: the mesh shape does not fit the world. Before any socket opens.
            RendezvousTimeoutError: ranks did not come; names them, on every rank that did.
            RankDisagreementError: the ranks ask for different things; on every rank that came.
            RendezvousError: a rank is claimed twice, the store cannot be reached or was lost, or
                the ranks met and then could not connect to each other.
            GroupConflictError: the group that is there is not the one asked for.
        """
        if self._state is State.OPEN:
            raise RuntimeStateError(
                "This runtime is open already; close() it first, or use the one you have."
            )
        # Imported here, not above: a process that asks only for the layout, such as a data-loading
        # worker, needs none of it.
        from distctx import devices, start

        request = self._request
        if self._device is not None:
            request = request._replace(device=devices.as_device(self._device))
        with _opening:
            return self._open(request, start.find(request))

    def _open(self, request: Request, there: World | None) -> DistributedRuntime:
        from distctx import start

        environment = there.environment if there else self._detect(needs_address=True)
        outer = self._outer(environment.world_size)
        place = self._find_place(environment.rank, environment.world_size)
        if there is None and environment.reason:
            level = logging.WARNING if environment.is_doubtful else logging.INFO
            log.log(level, "starting a world of 1: %s", environment.reason)
        if place.doubts:
            log.warning("%s", place.doubts)
        life = there or start.make(request, environment, place.layout)
        if outer is not None and outer._hold is not None and outer._hold.world is life:
            cache = outer._hold.cache
        else:
            cache = life.cache_of(place.layout, self.device_type or life.device.type, request)
        self._hold = life.hold(cache)
        self._environment, self._place = life.environment, place
        self._state = State.OPEN
        self._dropped = weakref.finalize(self, _was_dropped, self._hold, str(place))
        open_runtimes.append(weakref.ref(self))
        return self

    def close(self, *, abort: bool = False) -> None:
        """Give back exactly what ``open`` acquired; may be called twice.

        No barrier and no collective. Looks whether all ranks are through with building the group
        and the mesh, since one that still connects would be cut off, and waits for it, at most 2 s.

        An error that leaves a ``with`` block, and ends the world, is told in the store first. Where
        it came from another rank (a closed connection, a timeout), a note on it says which one
        failed first, or which have not failed 2 s later; a process that serves the store stays
        until those who ask have heard, at most 4 s.

        Args:
            abort: something failed, so peers may be stuck inside a collective: NCCL groups are
                aborted, which does not wait for them, in place of destroyed.
        """
        hold, self._hold = self._hold, None
        if hold is None:
            return
        self._state = State.CLOSED
        self._submeshes.clear()
        self._groups.clear()
        open_runtimes[:] = [ref for ref in open_runtimes if ref() not in (None, self)]
        if self._dropped is not None:
            self._dropped.detach()
        hold.release(abort=abort)

    def __enter__(self) -> DistributedRuntime:
        return self.open()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        is_clean = isinstance(error, SystemExit) and not error.code
        if error is None or is_clean or isinstance(error, GeneratorExit):
            self.close()
            return
        note = f"[distctx] {self._known_place()} on {socket.gethostname()}, pid {os.getpid()}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        farewell = self._farewell(error)
        try:
            with _noted_on(error, "telling the others"):
                if farewell is not None:
                    farewell.tell()
        finally:
            with _noted_on(error, "closing"):
                self.close(abort=True)
        with _noted_on(error, "asking the others"):
            if farewell is not None and (said := farewell.ask()):
                error.add_note(f"[distctx] {said}")

    def _farewell(self, error: BaseException) -> Farewell | None:
        """What to say and ask of an error that ends a world of several ranks."""
        hold = self._hold
        if hold is None or not hold.is_here or not hold.ends_the_world:
            return None
        world = hold.world
        if world.store is None or world.is_alone:
            return None
        from distctx.leaving import Farewell

        return Farewell(world, world.store, error)

    # For people.

    def describe(self, rank: int | None = None) -> Description:
        """What a person wants to know of a rank: its coordinate, its groups, its share. Talks to
        nobody.

        Args:
            rank: of whom; None: of this one.
        """
        from distctx import display  # here, since importing is not free

        return display.describe(self, rank)

    def __repr__(self) -> str:
        from distctx import display

        return f"DistributedRuntime({display.summary(self)})"

    def _repr_html_(self) -> str:
        from distctx import display

        return display.as_html(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self._state is State.OPEN:
            raise RuntimeStateError(
                "An open runtime stays in its process and cannot be pickled. Pass what needs no "
                "other rank, such as rt.dp_partition or rt.layout."
            )
        return object.__reduce_ex__(self, protocol)
