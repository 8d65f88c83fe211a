"""The place of one rank in its layout: everything that needs no other rank, worked out once."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs

from distctx.arguments import are_names, default_dim_names
from distctx.exceptions import LayoutError
from distctx.layout import (
    DATA_PARALLEL_DIMS,
    MODEL_PARALLEL_DIMS,
    TENSOR_PARALLEL_DIM,
    Dim,
    MeshLayout,
    Partition,
)

__all__ = ["Parallelism", "Place"]


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

    def unknown_names(self, layout: MeshLayout) -> tuple[str, ...]:
        """The names that mean nothing here, where nothing says along which dims data is split.

        Then the data is whole on every rank, which may not be meant.
        """
        if self.dp_mesh_dim is not None or self.dp_dims(layout) != ():
            return ()
        own = layout.dim_names if self.sharded_by_data_parallel else ()
        return tuple(name for name in own if name not in MODEL_PARALLEL_DIMS)

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
    parallelism: Parallelism
    coordinate: tuple[int, ...]
    dp_partition: Partition | None
    tp_size: int
    _indices: dict[tuple[Dim, ...], int] = attrs.field(init=False, factory=dict)

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
        coordinate = layout.coordinate(rank)
        return cls(rank, layout, parallelism, coordinate, partition, tp_size)

    def index(self, *dims: Dim) -> int:
        """The rank's index in its group along ``dims``; remembered where they are named.

        Raises:
            LayoutError: no such dim.
        """
        try:
            return self._indices[dims]
        except (KeyError, TypeError):  # no list is a key, nor a dim
            pass
        index = self.layout.index(self.rank, *dims)
        if are_names(dims):
            self._indices[dims] = index
        return index

    def seen_from(self, rank: int) -> Place:
        """The place of another rank in the same layout."""
        return Place.of(rank, self.layout, self.parallelism)

    @property
    def doubts(self) -> str:
        """What about the data may not be meant, in words; empty where all is clear."""
        unknown = self.parallelism.unknown_names(self.layout)
        if not unknown or self.layout.world_size == 1:
            return ""
        return (
            f"no dim of the mesh {self.layout} is known to split the data ({', '.join(unknown)} "
            "mean nothing here), so dp_partition is (1, 0) and every rank reads all of it; say "
            "dp_mesh_dim=, or sharded_by_data_parallel=False if that is meant"
        )

    def __str__(self) -> str:
        where = self.layout.name_of(self.coordinate)
        return f"rank {self.rank}/{self.layout.world_size} at {where}"

    def no_partition(self) -> LayoutError:
        """The error for asking which share is mine where nobody said how the data is split."""
        names = self.layout.dim_names
        return LayoutError(
            "Nothing says which dims of the mesh "
            f"{dict(zip(names, self.layout.shape, strict=True))} split the data: pass dp_mesh_dim= "
            "(an index, a name, or a tuple of them), or mesh_dim_names= with 'dp', or "
            "'dp_replicate' and 'dp_shard', among them; or sharded_by_data_parallel=False where "
            "every rank reads all of it."
        )
