"""MeshLayout and Partition against an enumeration of the mesh, and against torch's DeviceMesh."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from distctx.exceptions import LayoutError
from distctx.layout import MeshLayout, Partition
from launch import run

SHAPES = [(1,), (8,), (5, 7), (1, 1), (3, 2), (4, 1, 2), (2, 3, 4), (3, 1, 2, 2), (2, 2, 2, 2, 2)]

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def named(shape: tuple[int, ...]) -> MeshLayout:
    return MeshLayout(shape, tuple("abcde"[: len(shape)]))


def enumerated(shape: tuple[int, ...]) -> dict[tuple[int, ...], int]:
    """The rank at each coordinate, counted off one by one with the last dim fastest."""
    return {at: rank for rank, at in enumerate(itertools.product(*map(range, shape)))}


def selections(ndim: int) -> Iterator[tuple[int, ...]]:
    """Every choice of dims in every order, the empty one left out."""
    for count in range(1, ndim + 1):
        yield from itertools.permutations(range(ndim), count)


def walked_group(
    ranks: dict[tuple[int, ...], int], at: tuple[int, ...], dims: tuple[int, ...]
) -> list[int]:
    """The group through ``at``, found by moving along ``dims`` and looking each rank up."""
    shape = [max(indices) + 1 for indices in zip(*ranks, strict=True)]
    group = []
    for moved in itertools.product(*(range(shape[dim]) for dim in dims)):
        there = list(at)
        for dim, index in zip(dims, moved, strict=True):
            there[dim] = index
        group.append(ranks[tuple(there)])
    return group


class TestWhereRanksSit:
    @each_shape
    def test_coordinate_counts_row_major(self, shape):
        """Ranks are numbered row-major: the last dim varies fastest."""
        layout = MeshLayout(shape)
        for at, rank in enumerated(shape).items():
            assert layout.coordinate(rank) == at

    @each_shape
    def test_rank_inverts_coordinate(self, shape):
        """The rank at a rank's coordinate is that rank, for every rank."""
        layout = MeshLayout(shape)
        assert [layout.rank(layout.coordinate(r)) for r in range(layout.world_size)] == list(
            range(math.prod(shape))
        )

    @each_shape
    def test_strides_are_the_distance_between_neighbours(self, shape):
        """One step along a dim changes the rank by that dim's stride."""
        layout = MeshLayout(shape)
        assert len(layout.strides) == layout.ndim
        ranks = enumerated(shape)
        for at, rank in ranks.items():
            for dim, stride in enumerate(layout.strides):
                neighbour = (*at[:dim], at[dim] + 1, *at[dim + 1 :])
                assert ranks.get(neighbour, rank + stride) == rank + stride

    @each_shape
    def test_ranks_are_the_group_in_the_order_of_the_dims(self, shape):
        """The group along several dims is listed row-major in the order in which they are given."""
        layout, ranks = MeshLayout(shape), enumerated(shape)
        for dims in selections(len(shape)):
            for at, rank in ranks.items():
                assert layout.ranks(rank, *dims) == tuple(walked_group(ranks, at, dims))

    @each_shape
    def test_index_is_the_position_in_the_group(self, shape):
        """A rank stands in its own group at its index, and the group has the size that is told."""
        layout = MeshLayout(shape)
        for dims in selections(len(shape)):
            for rank in range(layout.world_size):
                group = layout.ranks(rank, *dims)
                assert group[layout.index(rank, *dims)] == rank
                assert len(group) == layout.size(*dims)

    @each_shape
    def test_groups_along_a_selection_partition_the_world(self, shape):
        """The groups along any dims hold every rank once, ordered by their first ranks, and each
        is the group of all its members."""
        layout = MeshLayout(shape)
        for dims in selections(len(shape)):
            groups = list(layout.all_groups(*dims))
            assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
            assert [group[0] for group in groups] == sorted(group[0] for group in groups)
            assert all(layout.ranks(rank, *dims) == group for group in groups for rank in group)

    @each_shape
    def test_members_sum_to_the_ranks(self, shape):
        """Every rank of a group is the sum of one number out of each of its ranges."""
        layout = MeshLayout(shape)
        for dims in selections(len(shape)):
            for rank in range(layout.world_size):
                members = layout.members(rank, *dims)
                assert len(members) == len(dims)
                sums = tuple(sum(parts) for parts in itertools.product(*members))
                assert sums == layout.ranks(rank, *dims)

    @each_shape
    def test_names_and_negative_indices_mean_the_same_dims(self, shape):
        """A dim is the same by name, by index, and by an index counted from the end."""
        layout = named(shape)
        for dims in selections(len(shape)):
            spellings = (
                [layout.dim_names[dim] for dim in dims],
                [dim - layout.ndim for dim in dims],
                [np.int64(dim) for dim in dims],
            )
            for spelling in spellings:
                assert layout.dims(spelling) == dims
                assert layout.size(*spelling) == layout.size(*dims)
                for rank in range(layout.world_size):
                    assert layout.ranks(rank, *spelling) == layout.ranks(rank, *dims)
                    assert layout.index(rank, *spelling) == layout.index(rank, *dims)

    @each_shape
    def test_no_dims_means_all_of_them(self, shape):
        """Without dims the group is the whole mesh, and a rank's index in it is the rank."""
        layout = MeshLayout(shape)
        world = tuple(range(layout.world_size))
        assert layout.size() == layout.world_size == math.prod(shape)
        assert list(layout.all_groups()) == [world]
        for rank in world:
            assert layout.ranks(rank) == world
            assert layout.index(rank) == rank

    @each_shape
    def test_partition_is_size_and_index(self, shape):
        """The share of a rank is the size of its group and its index there."""
        layout = MeshLayout(shape)
        for dims in selections(len(shape)):
            for rank in range(layout.world_size):
                assert layout.partition(rank, *dims) == (
                    layout.size(*dims),
                    layout.index(rank, *dims),
                )


def test_partition_feeds_a_sampler():
    """A partition unpacks into its two numbers, and says them in a sampler's words."""
    partition = MeshLayout((4, 2), ("dp", "tp")).partition(5, "dp")
    num_partitions, index = partition
    assert isinstance(partition, Partition)
    assert (num_partitions, index) == (4, 2)
    assert (partition.num_partitions, partition.partition_index) == (4, 2)
    assert partition.sampler_kwargs == {"num_replicas": 4, "rank": 2}


class TestShapeAndNames:
    @pytest.mark.parametrize(
        ("shape", "world_size", "resolved"),
        [
            ((-1,), 1, (1,)),
            ((-1,), 7, (7,)),
            ((-1, 2), 8, (4, 2)),
            ((2, -1), 8, (2, 4)),
            ((2, -1, 3), 6, (2, 1, 3)),
            ((2, 3), 6, (2, 3)),
            ((-1, 1 << 20), 1 << 60, (1 << 40, 1 << 20)),
        ],
    )
    def test_open_size_takes_what_is_left(self, shape, world_size, resolved):
        """Resolving gives the one open size what the others leave, and keeps the names."""
        layout = named(shape)
        result = layout.resolve(world_size)
        assert result.shape == resolved
        assert result.dim_names == layout.dim_names
        assert result.world_size == world_size
        assert result.is_resolved
        assert layout.is_resolved == (-1 not in shape)

    @pytest.mark.parametrize(
        ("ndim", "names"), [(1, ("dp",)), (2, ("dim_0", "dim_1")), (3, ("dim_0", "dim_1", "dim_2"))]
    )
    def test_names_by_default(self, ndim, names):
        """Without names of the caller's one dim is data parallel, and more are numbered."""
        layout = MeshLayout((2,) * ndim)
        assert layout.dim_names == names
        assert layout.ndim == ndim

    @pytest.mark.parametrize("two", [np.int64(2), np.int32(2), np.uint8(2)], ids=repr)
    def test_numpy_ints_are_ints(self, two):
        """Sizes, ranks and world sizes may be numpy integers, and come back as plain ones."""
        layout = MeshLayout((-1, two)).resolve(np.int64(4))
        assert layout == MeshLayout((2, 2))
        assert {type(size) for size in layout.shape} == {int}
        assert layout.coordinate(two) == (1, 0)
        assert layout.ranks(two, np.int64(1)) == (2, 3)

    def test_a_list_is_a_shape(self):
        """Shape and names may be lists, and are kept as tuples."""
        layout = MeshLayout([2, 3], ["a", "b"])
        assert (layout.shape, layout.dim_names) == ((2, 3), ("a", "b"))

    def test_equal_layouts_are_interchangeable(self):
        """Layouts of one shape and the same names are equal and hash alike; others differ."""
        layout = MeshLayout((2, 3), ("a", "b"))
        twin = MeshLayout([2, -1], ["a", "b"]).resolve(6)
        assert layout == twin
        assert hash(layout) == hash(twin)
        others = {MeshLayout((3, 2), ("a", "b")), MeshLayout((2, 3), ("a", "c")), named((6,))}
        assert layout not in others
        assert layout != ((2, 3), ("a", "b"))

    def test_copies_are_equal(self):
        """A layout survives copying and pickling, as on the way to a data-loading worker."""
        layout = MeshLayout((2, -1), ("dp", "tp"))
        assert pickle.loads(pickle.dumps(layout)) == layout
        assert copy.deepcopy(layout) == layout

    @pytest.mark.parametrize("attribute", ["shape", "dim_names", "note"])
    def test_layout_does_not_change(self, attribute):
        """No attribute of a layout can be set, whether it is there or not."""
        layout = MeshLayout((2, 3))
        with pytest.raises(AttributeError):
            setattr(layout, attribute, (4,))
        assert layout == MeshLayout((2, 3))

    def test_resolve_leaves_the_open_layout_open(self):
        """Resolving makes another layout and does not touch the one it is asked of."""
        layout = MeshLayout((-1, 2))
        layout.resolve(8)
        assert layout.shape == (-1, 2)

    def test_repr_shows_sizes_by_name(self):
        """The repr gives each size under its name, an open one as -1."""
        assert repr(MeshLayout((-1, 2), ("dp", "tp"))) == "MeshLayout(dp=-1, tp=2)"


OF_ONE_RANK: dict[str, Callable[[MeshLayout, int], Any]] = {
    "coordinate": lambda layout, rank: layout.coordinate(rank),
    "rank": lambda layout, rank: layout.rank(tuple(size - 1 for size in layout.shape)),
    "size": lambda layout, rank: layout.size("a", "c"),
    "index": lambda layout, rank: layout.index(rank, "c", "a"),
    "members": lambda layout, rank: layout.members(rank, "a", "b"),
    "strides": lambda layout, rank: layout.strides,
    "partition": lambda layout, rank: layout.partition(rank, "a", "b"),
    "ranks": lambda layout, rank: layout.ranks(rank, "b"),
    "resolve": lambda layout, rank: MeshLayout((-1, *layout.shape[1:])).resolve(rank + 1),
}

#: Worlds of 8, 2**20 and 2**60 ranks; ``b`` stays 2, so that a written-out group stays as small.
WORLDS = [(2, 2, 2), (1 << 9, 2, 1 << 10), (1 << 30, 2, 1 << 29)]


def bytecodes(call: Callable[[], object]) -> int:
    """How many bytecodes of Python ``call`` runs."""
    count = 0

    def count_each(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return count_each

    before = sys.gettrace()
    sys.settrace(count_each)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def peak_memory(call: Callable[[], object]) -> int:
    """The most bytes that ``call`` holds at once."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("question", OF_ONE_RANK)
class TestCost:
    def test_steps_do_not_follow_the_world(self, question):
        """What is asked of one rank takes the same steps in a world of 8 as in one of 2**60."""
        ask = OF_ONE_RANK[question]
        layouts = [named(shape) for shape in WORLDS]
        steps = {bytecodes(lambda la=layout: ask(la, la.world_size - 1)) for layout in layouts}
        assert len(steps) == 1
        assert steps.pop() > 10

    def test_memory_does_not_follow_the_world(self, question):
        """What is asked of one rank never writes the world out."""
        ask = OF_ONE_RANK[question]
        for shape in WORLDS:
            layout = named(shape)
            assert peak_memory(lambda la=layout: ask(la, la.world_size - 1)) < 8_192


def test_rank_of_numpy_indices_is_an_int():
    """A rank is a Python int, which cannot overflow, whatever ints its coordinate holds."""
    assert type(MeshLayout((2, 2)).rank((np.int8(1), np.int8(0)))) is int


def test_valid_sizes_are_told_whole_or_said_to_be_some():
    """The divisors in an error are all there are, or it says that there may be others."""
    with pytest.raises(LayoutError, match=r"one of: 1, 10007\.$"):
        MeshLayout((-1, 3)).resolve(10007)
    with pytest.raises(LayoutError, match=r"and maybe others\.$"):
        MeshLayout((-1, 3)).resolve(2**60)


@pytest.mark.parametrize("shape", [{2, 4}, {2: 4}, "24", 8, iter((2, 4))])
def test_what_has_no_order_is_no_shape(shape):
    """A shape is a sequence: what has no order of its own is refused."""
    with pytest.raises(LayoutError, match="must be a sequence of ints"):
        MeshLayout(shape)


def test_all_groups_are_made_one_by_one():
    """The first of very many groups is there without the others."""
    layout = named((1 << 30, 2, 1 << 29))
    assert next(layout.all_groups("b")) == (0, 1 << 29)


def test_refusing_a_world_takes_bounded_work():
    """A world that the sizes do not divide is refused without a walk through all its divisors."""
    with pytest.raises(LayoutError, match=f"world_size={1 << 60}"):
        MeshLayout((-1, 3)).resolve(1 << 60)


class TestErrors:
    @pytest.mark.parametrize(
        ("shape", "says"),
        [
            ((), ["mesh_shape=()", "at least one size", "(-1,)"]),
            ((0, 2), ["mesh_shape=(0, 2)", "holds 0", "at least 1", "-1 once"]),
            ((2, -2), ["mesh_shape=(2, -2)", "holds -2", "at least 1", "-1 once"]),
            ((-1, 2, -1), ["mesh_shape=(-1, 2, -1)", "-1 2 times", "only one size"]),
            ((True, 2), ["mesh_shape=(True, 2)", "must be an int", "got True (bool)"]),
            ((2.0, 2), ["mesh_shape=(2.0, 2)", "must be an int", "got 2.0 (float)"]),
            (("2", 2), ["mesh_shape=('2', 2)", "must be an int", "got '2' (str)"]),
            ((None, 2), ["mesh_shape=(None, 2)", "must be an int", "got None (NoneType)"]),
            ((np.float32(2), 2), ["must be an int", "float32"]),
            ("22", ["must be a sequence of ints", "(-1, 2)", "got '22'"]),
            (4, ["must be a sequence of ints", "(-1, 2)", "got 4"]),
            (None, ["must be a sequence of ints", "(-1, 2)", "got None"]),
        ],
        ids=repr,
    )
    def test_shape_that_cannot_be(self, shape, says):
        """A shape that is none is refused with what was got and what is valid."""
        self.refused(lambda: MeshLayout(shape), says)

    @pytest.mark.parametrize(
        ("names", "says"),
        [
            (("dp", "dp"), ["mesh_dim_names=('dp', 'dp')", "holds 'dp' 2 times", "differ"]),
            (("dp",), ["('dp',) has 1 names", "mesh_shape=(2, 4) has 2 dims", "one name for each"]),
            (("a", "b", "c"), ["has 3 names", "mesh_shape=(2, 4) has 2 dims", "one name for each"]),
            ((), ["has 0 names", "mesh_shape=(2, 4) has 2 dims"]),
            (("dp", 1), ["mesh_dim_names=('dp', 1)", "must be a str", "got 1"]),
            (("dp", ""), ["mesh_dim_names=('dp', '')", "not empty", "got ''"]),
            ("dt", ["must be a sequence of names", "('dp', 'tp')", "got 'dt'"]),
            (3, ["must be a sequence of names", "('dp', 'tp')", "got 3"]),
        ],
        ids=repr,
    )
    def test_names_that_do_not_fit(self, names, says):
        """Names that are not one for each dim, all different, are refused with what was got."""
        self.refused(lambda: MeshLayout((2, 4), names), says)

    @pytest.mark.parametrize(
        ("shape", "world_size", "says"),
        [
            ((2, 2), 8, ["mesh_shape=(2, 2) uses 4 ranks", "world_size=8", "-1", "start 4 ranks"]),
            ((4, 4), 8, ["mesh_shape=(4, 4) uses 16 ranks", "world_size=8", "start 16 ranks"]),
            ((-1, 3), 8, ["mesh_shape=(-1, 3)", "world_size=8", "one of: 1, 2, 4, 8."]),
            ((-1, 16), 8, ["mesh_shape=(-1, 16)", "world_size=8", "one of: 1, 2, 4, 8."]),
            ((2, -1, 3), 4, ["mesh_shape=(2, -1, 3)", "6 divides", "world_size=4", "1, 2, 4."]),
            (
                (-1, 13),
                55_440,
                ["13 divides", "world_size=55440", "11, 12, 14, 15, 16, 18, …, 55440"],
            ),
            ((-1,), 0, ["world_size must be at least 1", "got 0"]),
            ((-1,), -1, ["world_size must be at least 1", "got -1"]),
            ((-1,), True, ["world_size must be an int", "got True (bool)"]),
            ((-1,), "8", ["world_size must be an int", "got '8' (str)"]),
            ((-1,), 8.0, ["world_size must be an int", "got 8.0 (float)"]),
        ],
        ids=repr,
    )
    def test_world_that_does_not_fit(self, shape, world_size, says):
        """A shape that cannot hold the world is refused with both, and with what would fit."""
        self.refused(lambda: MeshLayout(shape).resolve(world_size), says)

    @pytest.mark.parametrize(
        "ask",
        [
            lambda layout: layout.world_size,
            lambda layout: layout.strides,
            lambda layout: layout.size("tp"),
            lambda layout: layout.coordinate(0),
            lambda layout: layout.rank((0, 0)),
            lambda layout: layout.index(0),
            lambda layout: layout.members(0, "tp"),
            lambda layout: layout.ranks(0, "tp"),
            lambda layout: layout.partition(0, "tp"),
            lambda layout: list(layout.all_groups("tp")),
        ],
    )
    def test_open_size_must_be_resolved_first(self, ask):
        """As long as a size is open, whatever depends on it says to resolve the layout."""
        layout = MeshLayout((-1, 2), ("dp", "tp"))
        self.refused(lambda: ask(layout), ["dp=-1, tp=2", "still holds -1", "resolve(world_size)"])

    @pytest.mark.parametrize(
        ("dim", "says"),
        [
            ("pp", ["dim='pp'", "its dims are dp, tp"]),
            (2, ["dim=2 is out of range for a mesh with shape (4, 2)"]),
            (-3, ["dim=-3 is out of range for a mesh with shape (4, 2)"]),
            (True, ["dim must be an int", "got True (bool)"]),
            (0.0, ["dim must be an int", "got 0.0 (float)"]),
            (None, ["dim must be an int", "got None"]),
        ],
        ids=repr,
    )
    def test_dim_that_is_not_there(self, dim, says):
        """A dim that the mesh does not have is refused with the ones it has."""
        layout = MeshLayout((4, 2), ("dp", "tp"))
        for ask in (
            lambda: layout.dim(dim),
            lambda: layout.size(dim),
            lambda: layout.index(0, dim),
            lambda: layout.ranks(0, dim),
            lambda: layout.members(0, "dp", dim),
            lambda: layout.partition(0, dim),
            lambda: list(layout.all_groups(dim)),
        ):
            self.refused(ask, says)

    @pytest.mark.parametrize("dims", [("dp", "dp"), (0, 0), ("dp", 0), (1, -1)], ids=repr)
    def test_dim_given_twice(self, dims):
        """One dim twice, in whatever spelling, is refused with what was given."""
        layout = MeshLayout((4, 2), ("dp", "tp"))
        self.refused(lambda: layout.ranks(0, *dims), [repr(dims), "a dim twice"])

    def test_error_names_the_argument_it_is_about(self):
        """A caller's own word for the dim stands in the error."""
        layout = MeshLayout((4, 2), ("dp", "tp"))
        self.refused(lambda: layout.dim("pp", "dp_mesh_dim"), ["dp_mesh_dim='pp'"])
        self.refused(lambda: layout.dims((0, 0), "dp_mesh_dim"), ["dp_mesh_dim=(0, 0)"])

    @pytest.mark.parametrize(
        ("rank", "says"),
        [
            (8, ["rank=8", "8 ranks", "(0 to 7)"]),
            (-1, ["rank=-1", "8 ranks", "(0 to 7)"]),
            (True, ["rank must be an int", "got True (bool)"]),
            (1.0, ["rank must be an int", "got 1.0 (float)"]),
            ("1", ["rank must be an int", "got '1' (str)"]),
            (None, ["rank must be an int", "got None"]),
        ],
        ids=repr,
    )
    def test_rank_outside_the_mesh(self, rank, says):
        """A rank that the mesh does not hold is refused with the ranks it holds."""
        layout = MeshLayout((4, 2), ("dp", "tp"))
        for ask in (layout.coordinate, layout.index, layout.members, layout.ranks):
            self.refused(lambda ask=ask: ask(rank), says)

    @pytest.mark.parametrize(
        ("coordinate", "says"),
        [
            ((0,), ["coordinate=(0,)", "2 dims"]),
            (5, ["coordinate=5", "2 dims"]),
            ((0, 0, 0), ["coordinate=(0, 0, 0)", "2 dims"]),
            ((4, 0), ["index 4 along dp", "from 0 to 3"]),
            ((0, -1), ["index -1 along tp", "from 0 to 1"]),
            ((0, True), ["index along tp must be an int", "got True (bool)"]),
            ((0.0, 1), ["index along dp must be an int", "got 0.0 (float)"]),
        ],
        ids=repr,
    )
    def test_coordinate_outside_the_mesh(self, coordinate, says):
        """A coordinate that is not in the mesh is refused with the range along that dim."""
        layout = MeshLayout((4, 2), ("dp", "tp"))
        self.refused(lambda: layout.rank(coordinate), says)

    def refused(self, call: Callable[[], object], says: list[str]) -> None:
        with pytest.raises(LayoutError) as caught:
            call()
        missing = [part for part in says if part not in str(caught.value)]
        assert not missing, str(caught.value)


@contextmanager
def fake_mesh(layout: MeshLayout, rank: int) -> Iterator[Any]:
    """torch's own mesh of that shape, as that rank sees it, without the other ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch wraps it, and leaves it so
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", layout.shape, mesh_dim_names=layout.dim_names)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@each_shape
def test_answers_are_those_of_device_mesh(shape):
    """Coordinates, groups, sub-meshes and sizes are those of torch's DeviceMesh on every rank."""
    import torch.distributed as dist

    layout = named(shape)
    for rank in range(layout.world_size):
        with fake_mesh(layout, rank) as mesh:
            assert list(layout.coordinate(rank)) == list(mesh.get_coordinate())
            assert layout.size() == mesh.size()
            for dim, name in enumerate(layout.dim_names):
                ranks = list(layout.ranks(rank, name))
                assert ranks == dist.get_process_group_ranks(mesh.get_group(dim))
                assert ranks == mesh[name].mesh.tolist()
                assert layout.size(name) == mesh.size(dim) == mesh[name].size()
                assert layout.index(rank, name) == mesh.get_local_rank(dim)
            for count in range(2, layout.ndim + 1):
                for names in itertools.combinations(layout.dim_names, count):
                    assert list(layout.ranks(rank, *names)) == mesh[names].mesh.flatten().tolist()


@pytest.mark.parametrize("module", ["distctx.layout", "distctx.environment", "distctx.place"])
def test_no_torch(module):
    """Layout, environment and place are imported without torch."""
    ended = run("-c", f"import sys, {module}; sys.exit('torch' in sys.modules)")
    assert ended.returncode == 0, ended.stderr
