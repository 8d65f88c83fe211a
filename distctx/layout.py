"""Where each rank sits: pure arithmetic over a mesh shape, the same on every rank.

Nothing here imports torch or talks to anyone. Ranks are numbered row-major: the last dim varies
fastest, as ``torch.distributed.device_mesh.init_device_mesh`` numbers them. Dims are usually named,
outermost first, out of ``pp, dp_replicate, dp_shard, cp, tp``.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import attrs

from distctx.arguments import (
    as_int,
    as_names,
    as_shape,
    default_dim_names,
    divisors,
    is_sequence,
)
from distctx.exceptions import LayoutError

__all__ = [
    "DATA_PARALLEL_DIMS",
    "MODEL_PARALLEL_DIMS",
    "TENSOR_PARALLEL_DIM",
    "Dim",
    "MeshLayout",
    "Partition",
]

#: A dim of a mesh: its name, or its index (a negative one counts from the end).
Dim = str | int

#: The names that mean data parallelism where nothing else is said, and the one that means tensor
#: parallelism.
DATA_PARALLEL_DIMS = ("dp", "dp_replicate", "dp_shard")
TENSOR_PARALLEL_DIM = "tp"

#: The names along which ranks read the same data.
MODEL_PARALLEL_DIMS = ("pp", "cp", "tp", "ep")


class Partition(NamedTuple):
    """Which share of the data is mine.

    Attributes:
        num_partitions: into how many shares the data is split.
        partition_index: which of them is this rank's, from 0.

    Example:
        >>> Partition(4, 1).sampler_kwargs
        {'num_replicas': 4, 'rank': 1}
    """

    num_partitions: int
    partition_index: int

    @property
    def sampler_kwargs(self) -> dict[str, int]:
        """Arguments for ``torch.utils.data.DistributedSampler``."""
        return {"num_replicas": self.num_partitions, "rank": self.partition_index}


@attrs.frozen(init=False, repr=False)
class MeshLayout:
    """A mesh shape with a name for each dim, and the arithmetic of who sits where in it.

    Every answer about one rank costs O(number of dims), whatever the size of the world; only
    ``ranks`` and ``members`` cost as much as the group they list. Nothing here talks to other
    ranks.

    Args:
        shape: the size of each dim, outermost first. One of them may be -1 until ``resolve``.
        dim_names: a name for each dim, no two alike. None: ``("dp",)`` for one dim, ``("dim_0",
            …)`` for more.

    Raises:
        LayoutError: a size that is 0, below -1, or no int; a second -1; as many names as dims are
            needed, and no name twice.

    Example:
        >>> layout = MeshLayout((-1, 2), ("dp", "tp")).resolve(world_size=8)
        >>> layout.coordinate(5)
        (2, 1)
        >>> layout.ranks(5, "dp")
        (1, 3, 5, 7)
        >>> layout.partition(5, "dp")
        Partition(num_partitions=4, partition_index=2)
    """

    shape: tuple[int, ...]
    dim_names: tuple[str, ...]

    def __init__(self, shape: Sequence[int], dim_names: Sequence[str] | None = None) -> None:
        sizes = as_shape(shape)
        names = default_dim_names(len(sizes)) if dim_names is None else as_names(dim_names)
        if len(names) != len(sizes):
            raise LayoutError(
                f"mesh_dim_names={names} has {len(names)} names, but mesh_shape={sizes} has "
                f"{len(sizes)} dims; pass one name for each dim."
            )
        self.__attrs_init__(sizes, names)  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        dims = ", ".join(
            f"{name}={size}" for name, size in zip(self.dim_names, self.shape, strict=True)
        )
        return f"MeshLayout({dims})"

    def draw(self, rank: int | None = None, *dims: Dim) -> str:
        """This layout as a grid of ranks that fits the terminal; what is too much is left out.

        Args:
            rank: marked ``[13]``.
            dims: mark the group of ``rank`` along these, ``(5)``, and list all such groups.

        Raises:
            LayoutError: a size is -1, or there is no such rank or dim.

        Example:
            >>> print(MeshLayout((2, 4), ("dp", "tp")).draw(5, "dp"))
            dp=2 × tp=4: 8 ranks
            <BLANKLINE>
              tp= 0   1   2   3
            dp=0  0  (1)  2   3
            dp=1  4  [5]  6   7
            <BLANKLINE>
            [5] rank 5 at (dp=1, tp=1)
            <BLANKLINE>
            ( ) its dp group: 1, 5
            dp groups: 4 of 2 ranks
              0, 4
              1, 5
              2, 6
              3, 7
        """
        from distctx.picture import draw  # a layout that nobody looks at needs none of it

        size = shutil.get_terminal_size()
        return str(draw(self, rank, dims, size.columns, max(size.lines, 24)))

    def _repr_html_(self) -> str:
        from distctx.picture import code, draw

        return draw(self).html(repr(self)) if self.is_resolved else code(repr(self))

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def is_resolved(self) -> bool:
        """Whether every size is known, so that no -1 is left."""
        return -1 not in self.shape

    @property
    def world_size(self) -> int:
        """The number of ranks in the mesh."""
        self._require_resolved()
        return math.prod(self.shape)

    def resolve(self, world_size: int) -> MeshLayout:
        """This layout for a world of ``world_size`` ranks, its -1 filled in.

        Raises:
            LayoutError: the sizes do not divide ``world_size``, or do not multiply to it.
        """
        world_size = as_int(world_size, "world_size")
        if world_size < 1:
            raise LayoutError(f"world_size must be at least 1, got {world_size}.")
        known = math.prod(size for size in self.shape if size != -1)
        if self.is_resolved:
            if known != world_size:
                raise LayoutError(
                    f"mesh_shape={self.shape} uses {known} ranks, but world_size={world_size}; "
                    f"change one size to -1 to let it follow the world, or start {known} ranks."
                )
            return self
        if world_size % known:
            choices = divisors(world_size)
            raise LayoutError(
                f"mesh_shape={self.shape} needs a world size that {known} divides, but "
                f"world_size={world_size}; the sizes beside -1 must multiply to one of: {choices}."
            )
        shape = tuple(world_size // known if size == -1 else size for size in self.shape)
        return MeshLayout(shape, self.dim_names)

    def _require_resolved(self) -> None:
        if not self.is_resolved:
            raise LayoutError(f"{self!r} still holds -1; call resolve(world_size) first.")

    def dim(self, dim: Dim, what: str = "dim") -> int:
        """The index of a dim given by name or by index; a negative index counts from the end.

        Raises:
            LayoutError: there is no such dim; lists the ones there are.
        """
        if isinstance(dim, str):
            if dim in self.dim_names:
                return self.dim_names.index(dim)
            raise LayoutError(
                f"{what}={dim!r} is not a dim of this mesh; its dims are "
                f"{', '.join(self.dim_names)}."
            )
        if isinstance(dim, (tuple, list)):
            raise LayoutError(f"{what}={dim!r} is several dims; pass each of them as an argument.")
        index = as_int(dim, what)
        if not -self.ndim <= index < self.ndim:
            raise LayoutError(f"{what}={index} is out of range for a mesh with shape {self.shape}.")
        return index % self.ndim

    def dims(self, dims: Iterable[Dim], what: str = "dim") -> tuple[int, ...]:
        """The indices of several dims, in the order given; no dims: all of them.

        Raises:
            LayoutError: there is no such dim, or one is given twice.
        """
        given = tuple(dims)
        indices = tuple(self.dim(dim, what) for dim in given)
        if len(set(indices)) != len(indices):
            raise LayoutError(f"{what}={given!r} holds a dim twice; give each dim once.")
        return indices or tuple(range(self.ndim))

    def in_order(self, dims: Iterable[Dim]) -> tuple[int, ...]:
        """The indices of several dims, which must be given in the order of the mesh.

        Raises:
            LayoutError: they are not, or there is no such dim.
        """
        given = tuple(dims)
        indices = self.dims(given)
        if list(indices) != sorted(indices):
            raise LayoutError(
                f"dims {given} are not in the order of the mesh; pass "
                f"{tuple(self.dim_names[i] for i in sorted(indices))}."
            )
        return indices

    def _check_rank(self, rank: int) -> int:
        self._require_resolved()
        rank = as_int(rank, "rank")
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank={rank} is outside this mesh of {self.world_size} ranks (0 to "
                f"{self.world_size - 1})."
            )
        return rank

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where ``rank`` sits: one index for each dim."""
        rest = self._check_rank(rank)
        indices = []
        for size in reversed(self.shape):
            rest, index = divmod(rest, size)
            indices.append(index)
        return tuple(reversed(indices))

    def rank(self, coordinate: Sequence[int]) -> int:
        """The rank that sits at ``coordinate``; the inverse of ``coordinate``."""
        self._require_resolved()
        if not is_sequence(coordinate) or len(coordinate) != self.ndim:
            raise LayoutError(
                f"coordinate={coordinate!r} must hold one index for each of the {self.ndim} dims."
            )
        rank = 0
        for given, size, name in zip(coordinate, self.shape, self.dim_names, strict=True):
            index = as_int(given, f"index along {name}")
            if not 0 <= index < size:
                raise LayoutError(
                    f"index {index} along {name} is out of range; it goes from 0 to {size - 1}."
                )
            rank = rank * size + index
        return rank

    def name_of(self, coordinate: Sequence[int]) -> str:
        """A coordinate as people read it, such as ``(dp=2, tp=1)``."""
        pairs = zip(self.dim_names, coordinate, strict=True)
        return f"({', '.join(f'{name}={index}' for name, index in pairs)})"

    def size(self, *dims: Dim) -> int:
        """The number of ranks in a group along ``dims``; no dims: the whole mesh."""
        self._require_resolved()
        return math.prod(self.shape[d] for d in self.dims(dims))

    def index(self, rank: int, *dims: Dim) -> int:
        """Which member of its group along ``dims`` a rank is, from 0; several dims count as one,
        row-major in the order given."""
        coordinate = self.coordinate(rank)
        index = 0
        for d in self.dims(dims):
            index = index * self.shape[d] + coordinate[d]
        return index

    def members(self, rank: int, *dims: Dim) -> tuple[range, ...]:
        """The group of ``rank`` along ``dims`` as one range for each dim: a member is a sum of one
        from each.

        Costs O(number of dims); ``ranks`` writes it out.
        """
        coordinate = self.coordinate(rank)
        strides = self.strides
        parts = []
        base = rank
        for d in self.dims(dims):
            base -= coordinate[d] * strides[d]
            parts.append(range(0, self.shape[d] * strides[d], strides[d]))
        first = parts[0]
        parts[0] = range(base, base + first.stop, first.step)
        return tuple(parts)

    def ranks(self, rank: int, *dims: Dim) -> tuple[int, ...]:
        """The ranks of the group of ``rank`` along ``dims``, in group order (row-major in the order
        given)."""
        first, *rest = self.members(rank, *dims)
        ranks = list(first)
        for part in rest:
            ranks = [base + step for base in ranks for step in part]
        return tuple(ranks)

    @property
    def strides(self) -> tuple[int, ...]:
        """How far apart in rank two neighbours along each dim are."""
        self._require_resolved()
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.append(strides[-1] * size)
        return tuple(reversed(strides))

    def all_groups(self, *dims: Dim) -> Iterator[tuple[int, ...]]:
        """Every group along ``dims``, in the order of their first ranks. Costs O(world size)."""
        for rank in range(self.world_size):
            if self.index(rank, *dims) == 0:
                yield self.ranks(rank, *dims)

    def partition(self, rank: int, *dims: Dim) -> Partition:
        """The share of the data of ``rank`` where it is split along ``dims``; without dims, along
        all."""
        return Partition(self.size(*dims), self.index(rank, *dims))
