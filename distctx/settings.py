"""What the caller sets on a runtime, and all that follows from it without asking another rank."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import attrs

from distctx.environment import LaunchEnvironment
from distctx.exceptions import LaunchEnvironmentError, RuntimeStateError
from distctx.layout import Dim, MeshLayout, Partition
from distctx.place import Parallelism, Place
from distctx.request import Request, as_timeout

if TYPE_CHECKING:
    from distctx.runtime import DistributedRuntime

__all__ = ["Settings", "innermost", "open_runtimes"]

#: The open runtimes of this process, the innermost last. Weak, so that one that is dropped goes.
open_runtimes: list[weakref.ref[DistributedRuntime]] = []


def innermost() -> DistributedRuntime | None:
    """The runtime that was opened last and is still open."""
    return next((rt for ref in reversed(open_runtimes) if (rt := ref()) is not None), None)


_setting: Any = attrs.setters.frozen


@attrs.define(eq=False, repr=False)
class Settings:
    """The half of a runtime that needs no other rank: the same before, during and after a life."""

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
    _asked_layout: MeshLayout | None = attrs.field(init=False, default=None)
    _environment: LaunchEnvironment | None = attrs.field(init=False, default=None)
    _place: Place | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        if self.store is not None and self.init_method is not None:
            raise LaunchEnvironmentError(
                "store= and init_method= both say where to meet; pass one of them."
            )
        if self._backend is not None and not (isinstance(self._backend, str) and self._backend):
            raise LaunchEnvironmentError(
                f"backend must be a name such as 'gloo', got {self._backend!r}. backend and "
                "init_method come first; pass mesh_shape= and mesh_dim_names= by name."
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
        if shape is not None or names is not None:
            # Names alone are for all ranks in one dim.
            self._asked_layout = MeshLayout((-1,) if shape is None else shape, names)
            self._parallelism().dp_dims(self._asked_layout)
            self._parallelism().tp_dim(self._asked_layout)

    @classmethod
    def simulate(cls, rank: int, world_size: int, **arguments: Any) -> Self:
        """A runtime that answers as that rank of that world, in this process alone. Talks to
        nobody.

        It is made, not opened. Opened, it has a real mesh, real sub-meshes and groups on torch's
        ``fake`` backend, for a look at how a program would be laid out: ``parallelize_module`` and
        ``fully_shard`` run as on that rank. Collectives return at once and compute nothing, so
        that values are not what they would be. It joins no real process group, and no real runtime
        joins it.

        Args:
            rank: whom to simulate.
            world_size: how many ranks the world has.
            arguments: as for the class, without ``backend``.

        Raises:
            LaunchEnvironmentError: the rank is outside the world, or an argument says where to
                meet.
            LayoutError: as for the class, or a mesh that does not fit the world.

        Example:
            >>> from distctx import DistributedRuntime
            >>> rt = DistributedRuntime.simulate(
            ...     1234, 4096, mesh_shape=(-1, 8), mesh_dim_names=("dp", "tp"))
            >>> rt.coordinate, rt.dp_partition.num_partitions
            ((154, 2), 512)
            >>> with rt:
            ...     rt.submesh("tp").get_local_rank(), rt.group("dp").size()
            (2, 512)
        """
        for name in ("backend", "init_method", "store"):
            if arguments.get(name) is not None:
                raise LaunchEnvironmentError(
                    f"simulate() takes no {name}=: nobody is there to meet, and the backend is "
                    "torch's 'fake'. Leave it out, or make a DistributedRuntime."
                )
        simulated = cls(**{**arguments, "backend": "fake", "rank": rank, "world_size": world_size})
        simulated._known_place()
        return simulated

    @property
    def is_simulated(self) -> bool:
        """Whether this answers for a world of which no other rank exists. Talks to nobody."""
        return self._request.backend == "fake"

    # Who this is.

    @property
    def rank(self) -> int:
        """Which process of the world this is, from 0. Talks to nobody."""
        return self._known_place().rank

    @property
    def world_size(self) -> int:
        """How many processes the world has. Talks to nobody."""
        return self._known_place().layout.world_size

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0. Talks to nobody."""
        return self.rank == 0

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
        return self._environment or self._detect()

    # Where it sits.

    @property
    def layout(self) -> MeshLayout:
        """The layout, with every size known. Talks to nobody; there before opening too."""
        return self._known_place().layout

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's index along each dim. Talks to nobody; there before opening too."""
        return (self._place or self._known_place()).coordinate

    def size(self, *dims: Dim) -> int:
        """The number of ranks in a group along ``dims``; no dims: the world. Talks to nobody."""
        return self.layout.size(*dims)

    def index(self, *dims: Dim) -> int:
        """This rank's index in its group along ``dims``; several dims count as one, row-major in
        the order given; no dims: the rank. Talks to nobody."""
        return (self._place or self._known_place()).index(*dims)

    def ranks(self, *dims: Dim) -> tuple[int, ...]:
        """The ranks of this rank's group along ``dims``; no dims: all. Talks to nobody."""
        return self.layout.ranks(self.rank, *dims)

    def draw(self, *dims: Dim) -> str:
        """The layout as a grid of ranks, this one marked ``[5]``, its group along ``dims`` ``(4)``.
        Talks to nobody; there before opening too.

        Raises:
            LayoutError: no such dim.
        """
        return self.layout.draw(self.rank, *dims)

    @property
    def dp_partition(self) -> Partition:
        """Which share of the data is this rank's. Talks to nobody; there before opening too.

        Raises:
            LayoutError: nothing says which dims split the data.
        """
        place = self._place or self._known_place()
        partition = place.dp_partition
        if partition is None:
            raise place.no_partition()
        return partition

    @property
    def tp_size(self) -> int:
        """How many ranks share one tensor. Talks to nobody; there before opening too."""
        return (self._place or self._known_place()).tp_size

    # Within.

    def _parallelism(self) -> Parallelism:
        return Parallelism(
            self.dp_mesh_dim,
            self.tp_mesh_dim,
            self.sharded_by_data_parallel,
            self.tensor_parallel_enabled,
        )

    def _detect(self, *, needs_address: bool = False) -> LaunchEnvironment:
        """What the launcher says; inside an open runtime, what that one knows."""
        inner = innermost()
        if inner is not None and inner._environment is not None:
            known = inner._environment
            if self._rank in (None, known.rank) and self._world_size in (None, known.world_size):
                return known
        return LaunchEnvironment.detect(
            rank=self._rank,
            world_size=self._world_size,
            init_method=self.init_method,
            needs_address=needs_address and self.store is None and self._request.backend != "fake",
        )

    def _outer(self, world_size: int) -> DistributedRuntime | None:
        """The open runtime whose layout and mesh this one has, since it asks for none."""
        outer = innermost() if self._asked_layout is None else None
        return outer if outer is not None and outer.world_size == world_size else None

    def _find_place(self, rank: int, world_size: int) -> Place:
        """The place of a rank in a world; in the outer runtime's layout where none is asked."""
        own, outer = self._parallelism(), self._outer(world_size)
        if outer is None or outer._place is None:
            layout = self._asked_layout or MeshLayout((-1,))
            return Place.of(rank, layout.resolve(world_size), own)
        outers = outer._place.parallelism
        if own.dp_mesh_dim is None:
            own = own._replace(dp_mesh_dim=outers.dp_mesh_dim)
        if own.tp_mesh_dim is None:
            own = own._replace(tp_mesh_dim=outers.tp_mesh_dim)
        return Place.of(rank, outer._place.layout, own)

    def _known_place(self) -> Place:
        """The place of this rank: of the life that is or was, else of the one that would be."""
        if self._place is not None:
            return self._place
        environment = self._detect()
        return self._find_place(environment.rank, environment.world_size)
