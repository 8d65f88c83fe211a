"""The plain functions over a mesh: on torch's own, in fake and real worlds, and on stand-ins."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from distctx.exceptions import DistctxError, LaunchEnvironmentError, LayoutError, RuntimeStateError
from distctx.layout import MeshLayout, Partition
from distctx.mesh import (
    DTENSOR_AVAILABLE,
    _resolve_dp_group_from_mesh,
    _resolve_mesh_dim_group,
    _resolve_mesh_submesh,
    build_device_mesh,
    ensure_distributed_initialized,
    resolve_data_parallel_partition,
    resolve_tensor_parallel_group_size,
)
from distctx.place import Parallelism, Place
from launch import run_bodies, value_of

REQUIRED = inspect.Parameter.empty

LAYOUTS = [
    MeshLayout((4,), ("dp",)),
    MeshLayout((1,), ("tp",)),
    MeshLayout((2, 3), ("dp", "tp")),
    MeshLayout((3, 1), ("tp", "cp")),
    MeshLayout((2, 3, 2), ("dp_replicate", "dp_shard", "tp")),
    MeshLayout((2, 1, 2, 3), ("pp", "dp", "cp", "tp")),
]

each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=repr)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """The world that a test started is ended, and the hook that torch wraps put back."""
    hook = sys.excepthook
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.excepthook = hook


def fake_world(rank: int, size: int) -> None:
    """Answer as ``rank`` of ``size`` from here on, without the others."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


def fake_mesh(layout: MeshLayout, rank: int) -> DeviceMesh:
    fake_world(rank, layout.world_size)
    return init_device_mesh("cpu", layout.shape, mesh_dim_names=layout.dim_names)


def stand_in(layout: MeshLayout, rank: int) -> SimpleNamespace:
    """No DeviceMesh, but what the functions look at; it needs no group."""
    return SimpleNamespace(
        mesh=torch.arange(layout.world_size).view(layout.shape),
        mesh_dim_names=layout.dim_names,
        get_coordinate=lambda: list(layout.coordinate(rank)),
    )


each_kind = pytest.mark.parametrize("mesh_of", [stand_in, fake_mesh])


def unnamed(shape: tuple[int, ...], coordinate: tuple[int, ...] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        mesh=torch.arange(math.prod(shape)).view(shape), get_coordinate=lambda: coordinate
    )


def spellings(layout: MeshLayout, dim: int) -> list[Any]:
    return [dim, dim - layout.ndim, np.int64(dim), layout.dim_names[dim]]


def selections(layout: MeshLayout) -> Iterator[tuple[int, ...]]:
    for count in range(1, layout.ndim + 1):
        yield from itertools.permutations(range(layout.ndim), count)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (
            ensure_distributed_initialized,
            {"backend": None, "init_method": None, "rank": None, "world_size": None},
        ),
        (
            build_device_mesh,
            {"device_type": "cuda", "mesh_shape": None, "mesh_dim_names": None},
        ),
        (_resolve_mesh_submesh, {"device_mesh": REQUIRED, "mesh_dim": REQUIRED}),
        (_resolve_mesh_dim_group, {"device_mesh": REQUIRED, "mesh_dim": REQUIRED}),
        (_resolve_dp_group_from_mesh, {"device_mesh": REQUIRED, "dp_mesh_dim": REQUIRED}),
        (
            resolve_data_parallel_partition,
            {
                "device_mesh": REQUIRED,
                "dp_mesh_dim": REQUIRED,
                "sharded_by_data_parallel": REQUIRED,
            },
        ),
        (
            resolve_tensor_parallel_group_size,
            {"device_mesh": REQUIRED, "tp_mesh_dim": REQUIRED, "tensor_parallel_enabled": REQUIRED},
        ),
    ],
)
def test_arguments_are_pinned(function, arguments):
    """The functions take exactly these arguments, in this order, by position and by name."""
    parameters = inspect.signature(function).parameters.values()
    assert [(p.name, p.default) for p in parameters] == list(arguments.items())
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_this_torch_has_device_mesh():
    """Where torch's DeviceMesh can be imported, it counts as available."""
    assert DTENSOR_AVAILABLE is True


class TestEnsureDistributedInitialized:
    def test_starts_a_world_of_one(self):
        """Without launcher and arguments it starts a gloo world of 1, once."""
        assert ensure_distributed_initialized() is True
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        assert ensure_distributed_initialized() is False

    def test_leaves_the_group_that_is_there(self):
        """A default group that somebody else made stays as it is, whatever is asked for."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        before = dist.group.WORLD
        assert ensure_distributed_initialized("fake", rank=1, world_size=4) is False
        assert dist.group.WORLD is before

    def test_backend_is_handed_on(self):
        """The backend that is asked for is the one of the group."""
        assert ensure_distributed_initialized("fake") is True
        assert dist.get_backend() == "fake"

    @pytest.mark.parametrize(
        ("query", "arguments"),
        [("", {"rank": 0, "world_size": 1}), ("?rank=0&world_size=1", {}), ("", {})],
    )
    def test_init_method_is_handed_on(self, tmp_path, query, arguments):
        """A URL of the caller's is where the ranks meet, with rank and world size in it or not."""
        store = tmp_path / "store"
        assert ensure_distributed_initialized("gloo", f"file://{store}{query}", **arguments) is True
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert store.exists()

    def test_launcher_is_followed(self, monkeypatch):
        """Rank, world size and address that are not given come from the launcher."""
        asked = self.recorded(monkeypatch)
        launch = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "meet", "MASTER_PORT": "29501"}
        for name, value in launch.items():
            monkeypatch.setenv(name, value)
        assert ensure_distributed_initialized() is True
        assert asked == {
            "backend": "gloo",
            "init_method": "tcp://meet:29501",
            "rank": 1,
            "world_size": 4,
        }

    @pytest.mark.parametrize(
        "launch",
        [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": ""}],
        ids=repr,
    )
    def test_half_a_launch_is_an_error(self, monkeypatch, launch):
        """A launch that is partly set or wrong starts nothing."""
        for name, value in launch.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LaunchEnvironmentError):
            ensure_distributed_initialized()
        assert not dist.is_initialized()

    def test_nccl_where_there_is_cuda(self, monkeypatch):
        """With CUDA the backend is nccl, bound to the current device."""
        asked = self.recorded(monkeypatch)
        self.pretend_cuda(monkeypatch)
        assert ensure_distributed_initialized() is True
        assert asked["backend"] == "nccl"
        assert asked["device_id"] == torch.device("cuda", 3)

    def test_no_device_for_another_backend(self, monkeypatch):
        """A backend other than nccl is bound to no device, even with CUDA."""
        asked = self.recorded(monkeypatch)
        self.pretend_cuda(monkeypatch)
        assert ensure_distributed_initialized("gloo") is True
        assert asked["backend"] == "gloo"
        assert "device_id" not in asked

    def test_no_device_where_torch_takes_none(self, monkeypatch):
        """A torch whose init_process_group knows no device_id is given none."""
        asked: dict[str, Any] = {}

        def older(backend=None, init_method=None, world_size=-1, rank=-1, store=None):
            asked.update(backend=backend)

        monkeypatch.setattr(dist, "init_process_group", older)
        self.pretend_cuda(monkeypatch)
        assert ensure_distributed_initialized() is True
        assert asked == {"backend": "nccl"}

    def test_torch_without_distributed(self, monkeypatch):
        """A torch that was built without distributed is a RuntimeError that says so."""
        monkeypatch.setattr(dist, "is_available", lambda: False)
        with pytest.raises(DistctxError, match=r"torch\.distributed is not available"):
            ensure_distributed_initialized()

    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What torch would be asked for, where the other ranks or the GPU are not there."""
        asked: dict[str, Any] = {}

        def init_process_group(device_id=None, **arguments):
            asked.update(arguments)
            if device_id is not None:
                asked["device_id"] = device_id

        monkeypatch.setattr(dist, "init_process_group", init_process_group)
        return asked

    def pretend_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)


def start_twice_and_reduce() -> list[Any]:
    """What each real rank does in the test below."""
    started = [ensure_distributed_initialized("gloo"), ensure_distributed_initialized("gloo")]
    mesh = build_device_mesh("cpu", (-1,), ("dp",))
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total, group=_resolve_mesh_dim_group(mesh, "dp"))
    partition = resolve_data_parallel_partition(mesh, None, True)
    dist.destroy_process_group()
    return [*started, total.item(), *partition]


def test_real_ranks_start_and_communicate(tmp_path):
    """Under torchrun the functions start one world, whose mesh carries a collective."""
    results = run_bodies(__name__, ["start_twice_and_reduce"], nproc=2, out=tmp_path)
    assert value_of(results, "start_twice_and_reduce") == [
        [True, False, 3, 2, 0],
        [True, False, 3, 2, 1],
    ]


class TestBuildDeviceMesh:
    def test_gloo_world_of_one(self):
        """In a real world of 1 the mesh is that one rank."""
        ensure_distributed_initialized("gloo")
        mesh = build_device_mesh("cpu")
        assert (mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names) == ("cpu", [0], None)

    def test_all_ranks_in_one_dim_by_default(self):
        """Without a shape the mesh holds all ranks in one dim."""
        fake_world(3, 8)
        assert build_device_mesh("cpu").mesh.tolist() == list(range(8))

    @pytest.mark.parametrize("shape", [(2, 3), [2, 3], (-1, 3), (2, -1), (np.int64(2), 3)])
    def test_shape_and_names(self, shape):
        """Shape and names are as asked, and one size may be left open."""
        fake_world(3, 6)
        mesh = build_device_mesh("cpu", shape, ["dp", "tp"])
        assert mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert mesh.mesh_dim_names == ("dp", "tp")

    def test_no_names_unless_given(self):
        """A mesh of several dims has no names that the caller did not give."""
        fake_world(3, 6)
        assert build_device_mesh("cpu", (2, 3)).mesh_dim_names is None

    @pytest.mark.parametrize(
        ("shape", "names", "text"),
        [
            ((4,), None, "mesh_shape=(4,) uses 4 ranks, but world_size=8."),
            ((4, 4), None, "mesh_shape=(4, 4) uses 16 ranks, but world_size=8."),
        ],
    )
    def test_shape_must_use_every_rank(self, shape, names, text):
        """A shape with more or fewer ranks than the world is a ValueError that gives both."""
        fake_world(0, 8)
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            build_device_mesh("cpu", shape, names)

    @pytest.mark.parametrize(
        ("shape", "names", "says"),
        [
            ((-1, 3), None, "world_size=8"),
            ((0,), None, "holds 0"),
            ((-1, -1), None, "-1 2 times"),
            ((2, 4), ("dp",), "1 names"),
            ((2, 4), ("dp", "dp"), "'dp' 2 times"),
        ],
    )
    def test_shape_or_names_that_cannot_be(self, shape, names, says):
        """What is no layout of this world is a ValueError, before any group is made."""
        fake_world(0, 8)
        with pytest.raises(ValueError, match=says):
            build_device_mesh("cpu", shape, names)

    def test_world_must_be_there(self):
        """Without a default group it says which call comes first."""
        text = "torch.distributed is not initialized. Call ensure_distributed_initialized() first."
        with pytest.raises(RuntimeStateError, match=f"^{re.escape(text)}$"):
            build_device_mesh("cpu")

    def test_torch_without_device_mesh(self, monkeypatch):
        """A torch without DeviceMesh is a RuntimeError that says so."""
        monkeypatch.setattr("distctx.mesh.DTENSOR_AVAILABLE", False)
        with pytest.raises(DistctxError, match="device_mesh is not available"):
            build_device_mesh("cpu")


class TestSubmeshesAndGroups:
    @each_layout
    def test_submesh_holds_the_group_of_that_dim(self, layout):
        """The sub-mesh along a dim, however it is spelt, holds the ranks that share it with me."""
        for rank in range(layout.world_size):
            mesh = fake_mesh(layout, rank)
            for dim in range(layout.ndim):
                for spelling in spellings(layout, dim):
                    submesh = _resolve_mesh_submesh(mesh, spelling)
                    assert tuple(submesh.mesh.tolist()) == layout.ranks(rank, dim)

    @pytest.mark.parametrize("names", [("dp",), None])
    def test_one_dim_is_its_own_submesh(self, names):
        """A mesh of one dim is itself the sub-mesh, with a name or without."""
        fake_world(1, 4)
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=names)
        assert _resolve_mesh_submesh(mesh, 0) is mesh

    def test_submesh_needs_names(self):
        """A mesh of several dims without names cannot be sliced; the error names the argument."""
        fake_world(1, 4)
        mesh = init_device_mesh("cpu", (2, 2))
        with pytest.raises(ValueError, match="mesh_dim_names"):
            _resolve_mesh_submesh(mesh, 0)

    @each_layout
    def test_group_holds_the_ranks_of_that_dim(self, layout):
        """The group along a dim, however it is spelt, is the mesh's own and holds those ranks."""
        for rank in range(layout.world_size):
            mesh = fake_mesh(layout, rank)
            for dim in range(layout.ndim):
                for spelling in spellings(layout, dim):
                    group = _resolve_mesh_dim_group(mesh, spelling)
                    assert group is mesh.get_group(dim)
                    assert tuple(dist.get_process_group_ranks(group)) == layout.ranks(rank, dim)
                    assert _resolve_dp_group_from_mesh(mesh, spelling) is group
                    assert _resolve_dp_group_from_mesh(mesh, (spelling,)) is group

    @pytest.mark.parametrize("resolve", [_resolve_mesh_dim_group, _resolve_dp_group_from_mesh])
    @pytest.mark.parametrize("dim", [5, 2, -3])
    def test_group_out_of_range(self, resolve, dim):
        """A dim beyond the mesh is a ValueError that gives it and the number of dims."""
        mesh = fake_mesh(MeshLayout((2, 3)), 0)
        text = f"mesh_dim={dim} is out of range for a mesh with 2 dimensions."
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            resolve(mesh, dim)

    @pytest.mark.parametrize("resolve", [_resolve_mesh_dim_group, _resolve_mesh_submesh])
    @pytest.mark.parametrize("dim", ["pp", True, 0.0, None])
    def test_what_is_no_dim(self, resolve, dim):
        """A name that is not there, or what is neither name nor index, is a ValueError."""
        mesh = fake_mesh(MeshLayout((2, 3), ("dp", "tp")), 0)
        with pytest.raises(ValueError, match="mesh_dim"):
            resolve(mesh, dim)

    def test_group_of_an_unnamed_mesh(self):
        """A mesh without names gives its groups by index, and says why it cannot by name."""
        fake_world(4, 6)
        mesh = init_device_mesh("cpu", (2, 3))
        assert dist.get_process_group_ranks(_resolve_mesh_dim_group(mesh, -1)) == [3, 4, 5]
        with pytest.raises(ValueError, match="no mesh_dim_names; pass an index from 0 to 1"):
            _resolve_mesh_dim_group(mesh, "tp")

    def test_no_dp_dim_is_no_group(self):
        """Without a data-parallel dim there is no such group, and the mesh is not looked at."""
        assert _resolve_dp_group_from_mesh(None, None) is None

    @each_layout
    def test_several_dims_are_one_group(self, layout):
        """A tuple of dims in the mesh's order is one group that spans them, the same each time."""
        for rank in range(layout.world_size):
            mesh = fake_mesh(layout, rank)
            for dims in selections(layout):
                if len(dims) > 1 and list(dims) == sorted(dims):
                    group = _resolve_dp_group_from_mesh(mesh, dims)
                    ranks = tuple(dist.get_process_group_ranks(group))
                    assert ranks == layout.ranks(rank, *dims)
                    names = tuple(layout.dim_names[dim] for dim in dims)
                    assert _resolve_dp_group_from_mesh(mesh, names) is group

    @pytest.mark.parametrize(
        ("names", "dims"),
        [
            (("dp", "tp"), (1, 0)),
            (("dp", "tp"), ("tp", "dp")),
            (("dp", "tp"), (0, 0)),
            (("dp", "tp"), ()),
            (("dp", "tp"), (0, 2)),
            (None, (0, 1)),
        ],
        ids=repr,
    )
    def test_several_dims_that_are_no_group(self, names, dims):
        """Dims out of order, twice, absent or without names make no group: a ValueError."""
        fake_world(0, 6)
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=names)
        with pytest.raises(ValueError, match="dp_mesh_dim="):
            _resolve_dp_group_from_mesh(mesh, dims)


class TestDataParallelPartition:
    @pytest.mark.parametrize(
        ("mesh", "sharded"), [(None, True), (None, False), (unnamed((2, 3), (1, 2)), False)]
    )
    @pytest.mark.parametrize("dim", [0, None, 7, "pp"])
    def test_whole_data(self, mesh, dim, sharded):
        """Without a mesh, or where the data is not sharded, every rank reads all of it."""
        assert resolve_data_parallel_partition(mesh, dim, sharded) == (1, 0)

    @pytest.mark.parametrize("dim", [None, 0, "dp"])
    def test_what_is_no_mesh_means_the_world(self, dim):
        """Without .mesh all ranks of the world share the data, and there is one without a group."""
        assert resolve_data_parallel_partition(object(), dim, True) == (1, 0)
        fake_world(2, 5)
        assert resolve_data_parallel_partition(object(), dim, True) == (5, 2)
        assert resolve_data_parallel_partition(object(), dim, False) == (1, 0)

    def test_result_is_a_partition_of_plain_ints(self):
        """The result is a Partition, and its numbers are ints whatever the mesh is made of."""
        mesh = SimpleNamespace(
            mesh=torch.arange(6).view(2, 3), get_coordinate=lambda: np.array([1, 2])
        )
        result = resolve_data_parallel_partition(mesh, (0, 1), True)
        assert isinstance(result, Partition)
        assert result == (6, 5)
        assert {type(number) for number in result} == {int}

    def test_coordinate_decides_and_not_the_rank(self):
        """In a mesh that numbers its ranks another way, the share follows the coordinate."""
        fake_world(1, 4)
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
        assert resolve_data_parallel_partition(mesh, "dp", True) == (2, 1)
        assert resolve_data_parallel_partition(mesh, "tp", True) == (2, 0)

    @each_kind
    def test_one_dim_needs_no_dp_dim(self, mesh_of):
        """A mesh of one dim is data parallel along it when no dim is given."""
        layout = MeshLayout((4,), ("anything",))
        shares = [
            resolve_data_parallel_partition(mesh_of(layout, rank), None, True) for rank in range(4)
        ]
        assert shares == [(4, 0), (4, 1), (4, 2), (4, 3)]

    @each_kind
    def test_several_dims_need_a_dp_dim(self, mesh_of):
        """In a mesh of several dims the dim must be given, whatever their names are."""
        with pytest.raises(ValueError, match=r"^dp_mesh_dim must be specified "):
            resolve_data_parallel_partition(mesh_of(LAYOUTS[2], 0), None, True)

    @pytest.mark.parametrize("dim", [2, -3, 100])
    @pytest.mark.parametrize("several", [False, True])
    @each_kind
    def test_out_of_range(self, mesh_of, dim, several):
        """A dim beyond the mesh is a ValueError that gives it and the shape."""
        text = f"dp_mesh_dim={dim} is out of range for a mesh with shape (2, 3)."
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            resolve_data_parallel_partition(
                mesh_of(LAYOUTS[2], 0), (0, dim) if several else dim, True
            )

    def test_name_without_names(self):
        """A name for a mesh that has none is a ValueError that says what to pass."""
        with pytest.raises(ValueError, match=r"dp_mesh_dim='dp' is a name.*from 0 to 1"):
            resolve_data_parallel_partition(unnamed((2, 3), (0, 0)), "dp", True)

    def test_rank_outside_the_mesh(self):
        """A rank that is not in the mesh has no share: a ValueError says so."""
        text = "^Current rank does not belong to the supplied DeviceMesh; "
        with pytest.raises(ValueError, match=text):
            resolve_data_parallel_partition(unnamed((2, 3)), 0, True)
        fake_world(3, 4)
        with pytest.raises(ValueError, match=text):
            resolve_data_parallel_partition(DeviceMesh("cpu", [0, 1]), None, True)


class TestTensorParallelGroupSize:
    @pytest.mark.parametrize(
        ("mesh", "enabled"), [(None, True), (None, False), (unnamed((2, 3)), False)]
    )
    @pytest.mark.parametrize("dim", [0, None, 7, "pp"])
    def test_off(self, mesh, dim, enabled):
        """Without a mesh, or with tensor parallelism off, a tensor is one rank's."""
        assert resolve_tensor_parallel_group_size(mesh, dim, enabled) == 1

    @pytest.mark.parametrize("dim", [None, 0, "tp"])
    def test_what_is_no_mesh_means_the_world(self, dim):
        """Without .mesh the whole world shares a tensor, and one rank does without a group."""
        assert resolve_tensor_parallel_group_size(object(), dim, True) == 1
        fake_world(2, 5)
        assert resolve_tensor_parallel_group_size(object(), dim, True) == 5
        assert resolve_tensor_parallel_group_size(object(), dim, False) == 1

    @pytest.mark.parametrize("shape", [(4,), (2, 3)])
    def test_no_tp_dim(self, shape):
        """Where no dim is given and none is named tp, a tensor is one rank's."""
        assert resolve_tensor_parallel_group_size(unnamed(shape), None, True) == 1

    def test_coordinate_is_not_needed(self):
        """A rank outside the mesh, and a mesh that tells no coordinate, have the size too."""
        assert resolve_tensor_parallel_group_size(unnamed((2, 3)), 1, True) == 3
        mesh = SimpleNamespace(mesh=torch.arange(6).view(2, 3))
        assert resolve_tensor_parallel_group_size(mesh, -2, True) == 2

    @pytest.mark.parametrize("dim", [2, -3, 100])
    @each_kind
    def test_out_of_range(self, mesh_of, dim):
        """A dim beyond the mesh is a ValueError that gives it and the shape."""
        text = f"tp_mesh_dim={dim} is out of range for a mesh with shape (2, 3)."
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            resolve_tensor_parallel_group_size(mesh_of(LAYOUTS[2], 0), dim, True)

    def test_name_without_names(self):
        """A name for a mesh that has none is a ValueError that says what to pass."""
        with pytest.raises(ValueError, match=r"tp_mesh_dim='tp' is a name.*from 0 to 1"):
            resolve_tensor_parallel_group_size(unnamed((2, 3)), "tp", True)


@each_layout
@each_kind
class TestSameAnswersAsThePlace:
    """The functions, asked of a mesh, and Place, asked of its layout, say the same."""

    def test_data_parallel(self, layout, mesh_of):
        """Every rank has the same share from both, along any dims, in any order and spelling."""
        for rank in range(layout.world_size):
            mesh = mesh_of(layout, rank)
            for dims in selections(layout):
                in_words = [spellings(layout, dim) for dim in dims]
                given = [*zip(*in_words, strict=True), *(in_words[0] if len(dims) == 1 else ())]
                for dp_mesh_dim, sharded in itertools.product(given, (True, False)):
                    asked = Parallelism(dp_mesh_dim=dp_mesh_dim, sharded_by_data_parallel=sharded)
                    assert (
                        resolve_data_parallel_partition(mesh, dp_mesh_dim, sharded)
                        == Place.of(rank, layout, asked).dp_partition
                        == (layout.partition(rank, *dims) if sharded else (1, 0))
                    )

    def test_tensor_parallel(self, layout, mesh_of):
        """Both give the same size along any dim, and along the one named tp when none is given."""
        rank = layout.world_size - 1
        mesh = mesh_of(layout, rank)
        given = [
            (spelling, layout.shape[dim])
            for dim in range(layout.ndim)
            for spelling in spellings(layout, dim)
        ]
        named_tp = layout.size("tp") if "tp" in layout.dim_names else 1
        for tp_mesh_dim, size in [*given, (None, named_tp)]:
            for enabled in (True, False):
                asked = Parallelism(tp_mesh_dim=tp_mesh_dim, tensor_parallel_enabled=enabled)
                assert (
                    resolve_tensor_parallel_group_size(mesh, tp_mesh_dim, enabled)
                    == Place.of(rank, layout, asked).tp_size
                    == (size if enabled else 1)
                )

    @pytest.mark.parametrize(
        "dim",
        [9, -9, "nothing", True, 0.0, (), (0, 0), (0, "nothing"), (0, 9), (True,)],
        ids=repr,
    )
    def test_errors(self, layout, mesh_of, dim):
        """What one refuses as a dim the other refuses too, with the name of the argument."""
        mesh = mesh_of(layout, 0)
        dp, tp = Parallelism(dp_mesh_dim=dim), Parallelism(tp_mesh_dim=dim)
        refused("dp_mesh_dim", lambda: resolve_data_parallel_partition(mesh, dim, True))
        refused("dp_mesh_dim", lambda: Place.of(0, layout, dp))
        refused("tp_mesh_dim", lambda: resolve_tensor_parallel_group_size(mesh, dim, True))
        refused("tp_mesh_dim", lambda: Place.of(0, layout, tp))


def refused(what: str, call: Callable[[], object]) -> None:
    with pytest.raises(LayoutError, match=what):
        call()


@pytest.mark.parametrize("names", [("dp",), None], ids=repr)
def test_one_dim_named_dp_is_the_same_to_both(names):
    """A mesh of one dim, named dp or by default, is data parallel to the functions and to Place."""
    layout = MeshLayout((4,), names)
    for rank in range(4):
        share = resolve_data_parallel_partition(stand_in(layout, rank), None, True)
        assert share == Place.of(rank, layout, Parallelism()).dp_partition == (4, rank)


@pytest.mark.parametrize(
    ("names", "share"), [(None, None), (("cp", "tp"), (1, 0)), (("dp", "tp"), (2, 1))], ids=repr
)
def test_only_the_place_follows_names_in_several_dims(names, share):
    """Where no dim is given in several dims the functions ask for one; Place follows the names of
    the caller, and knows no share without them."""
    layout = MeshLayout((2, 3), names)
    assert Place.of(4, layout, Parallelism()).dp_partition == share
    refused("dp_mesh_dim", lambda: resolve_data_parallel_partition(stand_in(layout, 4), None, True))


def test_the_one_difference():
    """A mesh of one dim with another name, when no dim is given, is data parallel to the functions,
    while Place follows the name."""
    layout = MeshLayout((4,), ("tp",))
    assert resolve_data_parallel_partition(stand_in(layout, 2), None, True) == (4, 2)
    assert Place.of(2, layout, Parallelism()).dp_partition == (1, 0)


def test_off_asks_for_no_dim():
    """Data or tensors that are not split are so for both layers, whatever dim is given."""
    mesh = unnamed((2, 2), (0, 0))
    off = Parallelism(9, 9, sharded_by_data_parallel=False, tensor_parallel_enabled=False)
    place = Place.of(0, MeshLayout((2, 2)), off)
    assert resolve_data_parallel_partition(mesh, 9, False) == place.dp_partition == (1, 0)
    assert resolve_tensor_parallel_group_size(mesh, 9, False) == place.tp_size == 1


def test_a_path_that_looks_like_a_query(tmp_path):
    """Only the query of init_method counts, not a path that holds the same words."""
    url = f"file://{tmp_path}/x_rank=0_world_size=1"
    assert ensure_distributed_initialized("gloo", url, rank=0, world_size=1)


def test_fake_needs_no_address():
    """The fake backend meets nobody, so a world of many needs no address."""
    assert ensure_distributed_initialized("fake", rank=1, world_size=4)
    assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
