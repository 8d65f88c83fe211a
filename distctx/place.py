"""The place of one rank in its layout: everything that needs no other rank, worked out once."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs

from distctx.exceptions import LayoutError, RuntimeStateError
from distctx.layout import (
    DATA_PARALLEL_DIMS,
    TENSOR_PARALLEL_DIM,
    Dim,
    MeshLayout,
    Partition,
    default_dim_names,
)

__all__ = ["Parallelism", "Place", "Placed"]


class Parallelism(NamedTuple):
    """Which dims of a mesh split the data, and which splits the tensors, as the caller says."""

    dp_mesh_dim: Dim | tuple[Dim, ...] | None = None
    tp_mesh_dim: Dim | None = None
    sharded_by_data_parallel: bool = True
    tensor_parallel_enabled: bool = True

    def dp_dims(self, layout: MeshLayout) -> tuple[int, ...] | None:
        """The dims of data parallelism, outermost first; none: the data is whole on every rank.

        None where nothing says: the names are default ones.
        """
        if not self.sharded_by_data_parallel:
            return ()
        if self.dp_mesh_dim is None:
            found = tuple(i for i, n in enumerate(layout.dim_names) if n in DATA_PARALLEL_DIMS)
            is_default = layout.dim_names == default_dim_names(layout.ndim)
            return None if is_default and not found else found
        several = isinstance(self.dp_mesh_dim, (tuple, list))
        given: Any = self.dp_mesh_dim if several else (self.dp_mesh_dim,)
        if not given:
            raise LayoutError(
                "dp_mesh_dim=() names no dim; pass None to follow the names, or "
                "sharded_by_data_parallel=False where the data is not split."
            )
        return layout.dims(given, "dp_mesh_dim")

    def tp_dim(self, layout: MeshLayout) -> int | None:
        """The dim of tensor parallelism, or None."""
        if not self.tensor_parallel_enabled:
            return None
        if self.tp_mesh_dim is not None:
            return layout.dim(self.tp_mesh_dim, "tp_mesh_dim")
        names = layout.dim_names
        return names.index(TENSOR_PARALLEL_DIM) if TENSOR_PARALLEL_DIM in names else None


@attrs.frozen(eq=False, repr=False)
class Place:
    """Where one rank sits, and what follows for its data and its tensors.

    ``dp_partition`` is None where nobody said which dims split the data.
    """

    rank: int
    layout: MeshLayout
    coordinate: tuple[int, ...]
    dp_partition: Partition | None
    tp_size: int

    @classmethod
    def of(cls, rank: int, layout: MeshLayout, parallelism: Parallelism) -> Place:
        """The place of ``rank`` in a resolved layout.

        Raises:
            LayoutError: the rank is outside the layout, or a dim that was given is not in it.
        """
        dp_dims, tp_dim = parallelism.dp_dims(layout), parallelism.tp_dim(layout)
        partition: Partition | None
        if dp_dims == ():
            partition = Partition(1, 0)
        else:
            partition = None if dp_dims is None else layout.partition(rank, *dp_dims)
        tp_size = layout.shape[tp_dim] if tp_dim is not None else 1
        return cls(rank, layout, layout.coordinate(rank), partition, tp_size)

    def __str__(self) -> str:
        where = self.layout.name_of(self.coordinate)
        return f"rank {self.rank}/{self.layout.world_size} at {where}"

    def no_partition(self) -> LayoutError:
        """The error for asking which share is mine where nobody said how the data is split."""
        names = self.layout.dim_names
        return LayoutError(
            f"Nothing says which dims of the mesh "
            f"{dict(zip(names, self.layout.shape, strict=True))} "
            "split the data: pass dp_mesh_dim= (an index, a name, or a tuple of them), or "
            "mesh_dim_names= with 'dp', or 'dp_replicate' and 'dp_shard', among them; or "
            "sharded_by_data_parallel=False where every rank reads all of it."
        )


class Placed:
    """The questions about one rank that need no other rank: the same before, during and after a
    life."""

    __slots__ = ()

    _place: Place | None

    def _known_place(self) -> Place:
        """The place of the life that is or was, else of the one that would be."""
        raise RuntimeStateError("this has no place in a world")

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
    def layout(self) -> MeshLayout:
        """The layout, with every size known. Talks to nobody; there before opening too."""
        return self._known_place().layout

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's index along each dim. Talks to nobody; there before opening too."""
        return self._known_place().coordinate

    def size(self, *dims: Dim) -> int:
        """The number of ranks in a group along ``dims``; no dims: the world. Talks to nobody."""
        return self.layout.size(*dims)

    def index(self, *dims: Dim) -> int:
        """This rank's index in its group along ``dims``; several dims count as one, row-major in
        the order given; no dims: the rank. Talks to nobody."""
        return self.layout.index(self.rank, *dims)

    def ranks(self, *dims: Dim) -> tuple[int, ...]:
        """The ranks of this rank's group along ``dims``; no dims: all. Talks to nobody."""
        return self.layout.ranks(self.rank, *dims)

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
