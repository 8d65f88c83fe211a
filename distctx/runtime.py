"""DistributedRuntime: one object that owns the distributed life of a process."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch

from distctx.environment import LaunchEnvironment
from distctx.exceptions import LaunchEnvironmentError, LayoutError, RuntimeStateError
from distctx.layout import Dim, MeshLayout
from distctx.place import Parallelism, Place, Placed
from distctx.request import Request, as_timeout

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from distctx.display import Description
    from distctx.mesh_cache import MeshCache
    from distctx.world import World

__all__ = ["DistributedRuntime", "State"]

log = logging.getLogger("distctx")


class State(enum.Enum):
    """Where a runtime is in its life."""

    UNOPENED = "unopened"  # made, and nothing acquired yet
    OPEN = "open"  # everything is acquired
    CLOSED = "closed"  # everything is given back; may be opened again


#: The open runtimes of this process, the innermost last.
_open: list[DistributedRuntime] = []

_setting: Any = attrs.setters.frozen


@attrs.define(eq=False, repr=False)
class DistributedRuntime(Placed):
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
        LayoutError: shape, names or dims that cannot be; a timeout that is none.
        LaunchEnvironmentError: an argument that no launch can have.

    Example:
        >>> with DistributedRuntime(mesh_shape=(-1, 1), mesh_dim_names=("dp", "tp")) as rt:
        ...     rt.dp_partition, rt.tp_size, rt.coordinate
        (Partition(num_partitions=1, partition_index=0), 1, (0, 0))
    """

    _backend: str | None = attrs.field(default=None, on_setattr=_setting)
    init_method: str | None = attrs.field(default=None, on_setattr=_setting)
    _rank: int | None = attrs.field(default=None, on_setattr=_setting)
    _world_size: int | None = attrs.field(default=None, on_setattr=_setting)
    device_type: str | None = attrs.field(default=None, on_setattr=_setting)
    mesh_shape: Sequence[int] | None = attrs.field(default=None, on_setattr=_setting)
    mesh_dim_names: Sequence[str] | None = attrs.field(default=None, on_setattr=_setting)
    dp_mesh_dim: Dim | tuple[Dim, ...] | None = attrs.field(default=None, on_setattr=_setting)
    tp_mesh_dim: Dim | None = attrs.field(default=None, on_setattr=_setting)
    sharded_by_data_parallel: bool = attrs.field(default=True, on_setattr=_setting)
    tensor_parallel_enabled: bool = attrs.field(default=True, on_setattr=_setting)
    timeout: float | timedelta | None = attrs.field(default=None, kw_only=True, on_setattr=_setting)
    rendezvous_timeout: float | timedelta | None = attrs.field(
        default=None, kw_only=True, on_setattr=_setting
    )
    store: Any = attrs.field(default=None, kw_only=True, on_setattr=_setting)
    pg_options: Any = attrs.field(default=None, kw_only=True, on_setattr=_setting)
    _device: Any = attrs.field(default=None, kw_only=True, on_setattr=_setting)

    _request: Request = attrs.field(init=False)
    _asked_layout: MeshLayout | None = attrs.field(init=False)
    _state: State = attrs.field(init=False, default=State.UNOPENED)
    _environment: LaunchEnvironment | None = attrs.field(init=False, default=None)
    _place: Place | None = attrs.field(init=False, default=None)
    _world: World | None = attrs.field(init=False, default=None)
    _cache: MeshCache | None = attrs.field(init=False, default=None)
    _submeshes: dict[tuple[Dim, ...], Any] = attrs.field(init=False, factory=dict)
    _groups: dict[tuple[Dim, ...], Any] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.store is not None and self.init_method is not None:
            raise LaunchEnvironmentError(
                "store= and init_method= both say where to meet; pass one of them."
            )
        self._request = Request(
            backend=None if self._backend is None else str(self._backend).lower(),
            rank=self._rank,
            world_size=self._world_size,
            device_type=self.device_type,
            init_method=self.init_method,
            timeout=as_timeout(self.timeout, "timeout"),
            rendezvous_timeout=as_timeout(self.rendezvous_timeout, "rendezvous_timeout"),
            store=self.store,
            pg_options=self.pg_options,
        )
        shape, names = self.mesh_shape, self.mesh_dim_names
        if shape is None and names is not None and len(tuple(names)) != 1:
            raise LayoutError(
                f"mesh_dim_names={tuple(names)!r} needs mesh_shape, a size for each name; one of "
                "them may be -1."
            )
        nothing_asked = shape is None and names is None
        self._asked_layout = (
            None if nothing_asked else MeshLayout((-1,) if shape is None else shape, names)
        )
        if self._asked_layout is not None:
            self._parallelism().dp_dims(self._asked_layout)
            self._parallelism().tp_dim(self._asked_layout)

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
            RankDisagreementError: the ranks ask for different things; on every rank.
            GroupConflictError: the group that is there is not the one asked for.
        """
        if self._state is State.OPEN:
            raise RuntimeStateError(
                "This runtime is open already; close() it first, or use the one you have."
            )
        # Imported here, not above: a process that asks only for the layout, such as a data-loading
        # worker, needs none of it.
        from distctx import devices, world

        request = self._request
        if self._device is not None:
            request = request._replace(device=devices.as_device(self._device))
        there = world.find(request)
        environment = self._detect(there, needs_address=True)
        outer = self._outer()
        layout, parallelism = self._resolve(environment.world_size)
        place = Place.of(environment.rank, layout, parallelism)
        if there is None and environment.reason:
            level = logging.WARNING if environment.is_doubtful else logging.INFO
            log.log(level, "starting a world of 1: %s", environment.reason)
        life = there or world.make(request, environment, layout)
        if outer is not None and outer._cache is not None and outer._world is life:
            cache = outer._cache
        else:
            cache = life.take_cache(layout, self.device_type or life.device.type, request)
        life.hold(self, cache)
        self._world, self._cache = life, cache
        self._environment, self._place = life.environment, place
        self._state = State.OPEN
        _open.append(self)
        return self

    def close(self, *, abort: bool = False) -> None:
        """Give back exactly what ``open`` acquired; may be called twice.

        No barrier and no collective. Looks whether all ranks are through with building the group
        and the mesh, since one that still connects would be cut off, and waits for it, at most 2 s.

        Args:
            abort: something failed, so peers may be stuck inside a collective: NCCL groups are
                aborted, which does not wait for them, in place of destroyed. Looks at nobody.
        """
        if self._state is not State.OPEN or self._world is None or self._cache is None:
            return
        life, cache = self._world, self._cache
        self._state, self._world, self._cache = State.CLOSED, None, None
        self._submeshes.clear()
        self._groups.clear()
        _open.remove(self)
        life.leave(self, cache, abort=abort)

    def __enter__(self) -> DistributedRuntime:
        return self.open()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        where = f"{self._known_place()} on {socket.gethostname()}, pid {os.getpid()}"
        error.add_note(f"[distctx] {where}")
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
        return self._world is not None and self._world.would_end_with(self)

    # Who this is.

    @property
    def local_rank(self) -> int:
        """Which process of its host this is, from 0. Talks to nobody.

        Raises:
            RuntimeStateError: the launcher does not say; the ranks find out when they open.
        """
        local_rank = self.environment.local_rank
        if local_rank is None:
            raise RuntimeStateError(
                "The launcher does not say which rank of its host this is (LOCAL_RANK is not set), "
                "and ranks find out only when they start their world with distctx: set LOCAL_RANK, "
                "or ask after open()."
            )
        return local_rank

    @property
    def environment(self) -> LaunchEnvironment:
        """What the launcher said; with what the ranks found out, once open. Talks to nobody."""
        return self._environment or self._detect(_open[-1]._world if _open else None)

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
        """
        return self._built("mesh").root()

    def submesh(self, *dims: Dim) -> DeviceMesh:
        """The mesh along ``dims``, in mesh order; no dims: the mesh. Talks to every rank at first
        use.

        Raises:
            LayoutError: no such dim, or not in mesh order.
            RuntimeStateError: not open.
        """
        found = self._submeshes.get(dims)
        if found is None:
            cache = self._built(f"submesh{dims}")
            found = self._submeshes[dims] = cache.submesh(self._in_order(dims))
        return found

    def group(self, *dims: Dim) -> Any:
        """The process group along ``dims``; several: the one that spans them; no dims: WORLD.
        Talks to every rank at first use.

        Raises:
            LayoutError: no such dim, or not in mesh order.
            RuntimeStateError: not open.
        """
        found = self._groups.get(dims)
        if found is None:
            cache = self._built(f"group{dims}")
            found = cache.group(self._in_order(dims)) if dims else self._life("group").group
            self._groups[dims] = found
        return found

    # Waiting for each other.

    def barrier(self) -> None:
        """Wait for every rank, for at most the group's timeout. Talks to every rank."""
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
        from distctx.display import describe

        return describe(self, rank)

    def __repr__(self) -> str:
        from distctx.display import summary

        return f"DistributedRuntime({summary(self)})"

    def __dir__(self) -> Iterator[str]:
        # Completion and variable panes read every name they find here, and reading `mesh` builds
        # it.
        hidden = () if self._cache is not None and self._cache.is_built else ("mesh",)
        return (name for name in object.__dir__(self) if name not in hidden)

    # Within.

    def _parallelism(self) -> Parallelism:
        return Parallelism(
            self.dp_mesh_dim,
            self.tp_mesh_dim,
            self.sharded_by_data_parallel,
            self.tensor_parallel_enabled,
        )

    def _detect(self, life: World | None, *, needs_address: bool = False) -> LaunchEnvironment:
        if life is not None:
            return life.environment
        return LaunchEnvironment.detect(
            rank=self._rank,
            world_size=self._world_size,
            init_method=self.init_method,
            needs_address=needs_address and self.store is None and self._request.backend != "fake",
        )

    def _outer(self) -> DistributedRuntime | None:
        """The open runtime whose layout and mesh this one has, since it asks for none."""
        if self._asked_layout is not None:
            return None
        return next((rt for rt in reversed(_open) if rt is not self), None)

    def _resolve(self, world_size: int) -> tuple[MeshLayout, Parallelism]:
        """The layout for a world, and what splits what; the outer runtime's where none is asked."""
        own, outer = self._parallelism(), self._outer()
        if outer is None:
            return (self._asked_layout or MeshLayout((-1,))).resolve(world_size), own
        outers = outer._parallelism()
        if own.dp_mesh_dim is None:
            own = own._replace(dp_mesh_dim=outers.dp_mesh_dim)
        if own.tp_mesh_dim is None:
            own = own._replace(tp_mesh_dim=outers.tp_mesh_dim)
        return outer.layout, own

    def _known_place(self) -> Place:
        """The place of this rank: of the life that is or was, else of the one that would be."""
        if self._place is not None:
            return self._place
        environment = self._detect(_open[-1]._world if _open else None)
        layout, parallelism = self._resolve(environment.world_size)
        return Place.of(environment.rank, layout, parallelism)

    def _place_of(self, rank: int | None) -> Place:
        """The place of any rank of the world; None: of this one."""
        own = self._known_place()
        if rank is None or rank == own.rank:
            return own
        return Place.of(rank, own.layout, self._resolve(own.layout.world_size)[1])

    def _life(self, what: str) -> World:
        if self._world is None:
            self._refuse(what)
        return self._world

    def _built(self, what: str) -> MeshCache:
        if self._cache is None:
            self._refuse(what)
        return self._cache

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeStateError(
            f"{what} needs an open runtime, and this one is {self._state.value}; ask inside "
            "`with rt:`, or after rt.open()."
        )

    def _in_order(self, dims: tuple[Dim, ...]) -> tuple[int, ...]:
        indices = self.layout.dims(dims)
        if list(indices) != sorted(indices):
            raise LayoutError(
                f"dims {dims} are not in the order of the mesh; pass "
                f"{tuple(self.layout.dim_names[i] for i in sorted(indices))}."
            )
        return indices
