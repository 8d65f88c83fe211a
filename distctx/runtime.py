"""DistributedRuntime: one object that owns the distributed life of a process."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

import attrs

from distctx.exceptions import RuntimeStateError
from distctx.layout import Dim
from distctx.request import Request
from distctx.settings import Settings, open_runtimes

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from distctx.display import Description
    from distctx.mesh_cache import MeshCache
    from distctx.world import Hold, World

__all__ = ["DistributedRuntime", "State"]

log = logging.getLogger("distctx")


class State(enum.Enum):
    """Where a runtime is in its life."""

    UNOPENED = "unopened"  # made, and nothing acquired yet
    OPEN = "open"  # everything is acquired
    CLOSED = "closed"  # everything is given back; may be opened again


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


def _listed(dims: tuple[Dim, ...]) -> str:
    return ", ".join(map(repr, dims))


def _forget_after_fork() -> None:
    """A child must ask anew, and is then refused: groups are of no use without their threads."""
    global _opening
    _opening = threading.RLock()  # another thread of the parent may hold it
    for ref in open_runtimes:
        if (rt := ref()) is not None:
            rt._submeshes.clear()
            rt._groups.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


@attrs.define(eq=False, repr=False)
class DistributedRuntime(Settings):
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

    _state: State = attrs.field(init=False, default=State.UNOPENED)
    _hold: Hold | None = attrs.field(init=False, default=None)
    _dropped: weakref.finalize[Any, DistributedRuntime] | None = attrs.field(
        init=False, default=None
    )
    _submeshes: dict[tuple[Dim, ...], Any] = attrs.field(init=False, factory=dict)
    _groups: dict[tuple[Dim, ...], Any] = attrs.field(init=False, factory=dict)

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

        Args:
            abort: something failed, so peers may be stuck inside a collective: NCCL groups are
                aborted, which does not wait for them, in place of destroyed. Looks at nobody.
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
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        note = f"[distctx] {self._known_place()} on {socket.gethostname()}, pid {os.getpid()}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        try:
            self.close(abort=True)
        except Exception as failure:
            error.add_note(f"[distctx] and closing failed: {type(failure).__name__}: {failure}")

    @property
    def state(self) -> State:
        """UNOPENED, OPEN or CLOSED. Talks to nobody."""
        return self._state

    @property
    def owns_process_group(self) -> bool:
        """Whether closing this runtime now would destroy the process group. Talks to nobody."""
        return self._hold is not None and self._hold.ends_the_world

    @property
    def device(self) -> torch.device:
        """The device of this process. Talks to nobody.

        Raises:
            RuntimeStateError: not open.
        """
        return self._life("device").device

    @property
    def backend(self) -> str:
        """The backend of the process group. Talks to nobody.

        Raises:
            RuntimeStateError: not open.
        """
        return self._life("backend").backend

    # The mesh: these talk to every rank, the first time.

    @property
    def mesh(self) -> DeviceMesh:
        """The DeviceMesh of all dims. The first touch of it, of ``submesh`` or of ``group`` talks
        to every rank, and every rank must come; after that it is the same object and talks to
        nobody.

        Raises:
            RuntimeStateError: not open.
            RendezvousTimeoutError: some ranks did not come here; names them.
            RankDisagreementError: the ranks came for different things.
            RendezvousError: the store was lost, or the ranks could not connect to each other.
        """
        return self._built("mesh").root()

    def submesh(self, *dims: Dim) -> DeviceMesh:
        """The mesh along ``dims``, in mesh order; no dims: the mesh. Talks to every rank at first
        use.

        Raises:
            LayoutError: no such dim, or not in mesh order.
            RuntimeStateError: not open.
            RendezvousError: and its kinds, as for ``mesh``.
        """
        found = self._submeshes.get(dims)
        if found is None:
            cache = self._built(f"submesh({_listed(dims)})")
            found = self._submeshes[dims] = cache.submesh(self.layout.in_order(dims))
        return found

    def group(self, *dims: Dim) -> ProcessGroup:
        """The process group along ``dims``; several: the one that spans them; no dims: WORLD.
        Talks to every rank at first use.

        Raises:
            LayoutError: no such dim, or not in mesh order.
            RuntimeStateError: not open.
            RendezvousError: and its kinds, as for ``mesh``.
        """
        found = self._groups.get(dims)
        if found is None:
            cache = self._built(f"group({_listed(dims)})")
            found = cache.group(self.layout.in_order(dims)) if dims else self._life("group").group
            self._groups[dims] = found
        group: ProcessGroup = found
        return group

    # Waiting for each other.

    def barrier(self) -> None:
        """Wait for every rank, for at most the group's timeout. Talks to every rank.

        Raises:
            RendezvousTimeoutError: a rank did not come in time; on gloo the main rank's error names
                it, in words and in ``missing_ranks``.
        """
        from distctx import sync

        sync.barrier(self._life("barrier()"))

    def main_first(self, *, local: bool = False) -> contextlib.AbstractContextManager[None]:
        """A block that the main rank runs first, and the others when it is done. Talks to every
        rank.

        No collective is open meanwhile, so a long body trips no timeout of the group.

        Args:
            local: the first rank of each host goes first, in place of rank 0.

        Raises:
            RemoteRankError: the one that goes first failed in its body; raised on the others.
            RendezvousTimeoutError: it gave no sign of life for the group's timeout.

        Example:
            >>> with DistributedRuntime() as rt, rt.main_first():
            ...     print("rank", rt.rank, "prepares the data, the others find it ready")
            rank 0 prepares the data, the others find it ready
        """
        from distctx import sync

        life = self._life("main_first()")
        if local:
            _ = self.local_rank
        return sync.first(life, local)

    # For people.

    def describe(self, rank: int | None = None) -> Description:
        """What a person wants to know of a rank: its coordinate, its groups, its share. Talks to
        nobody.

        Args:
            rank: of whom; None: of this one.
        """
        from distctx import display  # here, since importing is not free

        return display.describe(self, rank)

    def breakpoint(
        self, rank: int | Sequence[int] | None = None, *, when: object = None, **dims: int
    ) -> None:
        """Stop one rank in pdb, in the line after this one; the others wait until it goes on.
        Every rank must come here. Talks to every rank, through the store alone.

        The others wait in no collective, so no group times out however long a person thinks. At a
        terminal of its own the rank is in plain pdb; elsewhere, as under torchrun, it prints the
        ``python -m distctx attach`` that opens it. ``c`` lets all go on, ``release`` lets the
        others go on while this one is stepped, ``q`` ends every rank, with exit status 0.

        Args:
            rank: who stops, one or several. None: rank 0, unless ``when`` or a dim says who.
            when: stop only where this is true; each rank decides for itself.
            dims: stop only those at this index along a dim, such as ``dp=0``.

        Raises:
            RuntimeStateError: not open.
            LayoutError: no such rank, dim or index.
            RemoteRankError: a rank ended while it was stopped; raised on those that waited.
            RendezvousTimeoutError: a rank did not come here within the group's timeout.
            RendezvousError: the store was lost.
        """
        from distctx import breakpoints

        life = self._life("breakpoint()")
        meant = breakpoints.selects(self.layout, self.rank, rank, when, dims)
        breakpoints.stop(life, self.layout, meant, sys._getframe(1))

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

    def __dir__(self) -> Iterator[str]:
        # Completion and variable panes read every name they find here, and reading `mesh` builds
        # it.
        hidden = () if self._hold is not None and self._hold.cache.is_built else ("mesh",)
        return (name for name in object.__dir__(self) if name not in hidden)

    # Within.

    def _life(self, what: str) -> World:
        return self._open_hold(what).world

    def _built(self, what: str) -> MeshCache:
        return self._open_hold(what).cache

    def _open_hold(self, what: str) -> Hold:
        if self._hold is None:
            raise RuntimeStateError(
                f"{what} needs an open runtime, and this one is {self._state.value}; ask inside "
                "`with rt:`, or after rt.open()."
            )
        if not self._hold.is_here:
            raise RuntimeStateError(
                f"{what} is not to be had in a child of the process that opened the runtime. Pass "
                "it what needs no other rank, such as rt.dp_partition or rt.layout."
            )
        return self._hold
