"""DistributedRuntime in one process: a real gloo world of 1, and the fake backend for larger
ones."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from distctx import (
    DistctxError,
    DistributedRuntime,
    GroupConflictError,
    LaunchEnvironmentError,
    LayoutError,
    Partition,
    RuntimeStateError,
    State,
    _torch,
    stores,
    world,
)
from launch import run

NAMES = ("dp", "tp")


def groups() -> int:
    """How many process groups this process holds."""
    return _torch.number_of_groups()


@pytest.fixture
def bare_group():
    """A default group that distctx did not make: a world of 1."""
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
    sys.excepthook = hook


def test_plain_python_is_a_world_of_one():
    """Without a launcher a runtime is rank 0 of 1, on gloo and the CPU."""
    with DistributedRuntime() as rt:
        assert (rt.rank, rt.world_size, rt.local_rank, rt.is_main_process) == (0, 1, 0, True)
        assert (rt.backend, rt.device) == ("gloo", torch.device("cpu"))
        assert dist.get_world_size() == 1
        assert dist.get_backend() == "gloo"
        assert rt.dp_partition == (1, 0)
        assert rt.tp_size == 1
        assert rt.environment.launcher == "none"


def test_world_of_one_has_no_store_port():
    """A world of 1 without a launcher opens no TCP store, and binds no device to its group."""
    with DistributedRuntime():
        store = _torch.default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        assert isinstance(store, dist.HashStore)
        assert dist.group.WORLD.bound_device_id is None
    assert not [key for key in stores._kept if key.startswith("tcp")]


def test_the_reason_for_one_process_is_logged(caplog):
    """A world of 1 without a launch logs why it is one."""
    caplog.set_level("INFO", logger="distctx")
    with DistributedRuntime():
        pass
    assert "no launcher has set RANK" in caplog.text


def test_one_process_inside_a_larger_job_is_warned_of(caplog, monkeypatch):
    """One process where a batch job has more tasks is a warning, seen without any set-up of
    logging."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    with DistributedRuntime():
        pass
    (record,) = [one for one in caplog.records if one.name == "distctx"]
    assert record.levelname == "WARNING"
    assert "SLURM_NTASKS=8" in record.getMessage()


def test_states():
    """A runtime is unopened, then open, then closed, and its group is there just while it is
    open."""
    rt = DistributedRuntime()
    assert rt.state is State.UNOPENED
    assert not rt.owns_process_group
    assert rt.open() is rt
    assert rt.state is State.OPEN
    assert rt.owns_process_group
    assert dist.is_initialized()
    rt.close()
    assert rt.state is State.CLOSED
    assert not dist.is_initialized()
    rt.close()
    assert rt.state is State.CLOSED


def test_a_closed_runtime_opens_again():
    """A runtime that was closed can be opened again, and has a mesh of its own then."""
    rt = DistributedRuntime()
    with rt:
        before = rt.mesh
    with rt:
        assert rt.mesh is not before


def test_open_while_open_is_refused():
    """Opening an open runtime is an error that says so, and leaves it open."""
    with DistributedRuntime() as rt:
        with pytest.raises(RuntimeStateError, match="open already"):
            rt.open()
        assert rt.state is State.OPEN


@pytest.mark.parametrize(
    "ask",
    [
        lambda rt: rt.mesh,
        lambda rt: rt.submesh("dp"),
        lambda rt: rt.group("dp"),
        lambda rt: rt.group(),
        lambda rt: rt.device,
        lambda rt: rt.backend,
        lambda rt: rt.barrier(),
        lambda rt: rt.main_first(),
    ],
)
def test_what_needs_an_open_runtime_says_so(ask):
    """What only an open runtime has is refused before and after, with the state and what to do."""
    rt = DistributedRuntime()
    with pytest.raises(RuntimeStateError, match="unopened; ask inside"):
        ask(rt)
    with rt:
        ask(rt)
    with pytest.raises(RuntimeStateError, match="closed; ask inside"):
        ask(rt)


def test_the_layout_is_known_before_and_after():
    """What follows from shape and rank is there before opening and after closing."""
    rt = DistributedRuntime("fake", rank=5, world_size=8, mesh_shape=(-1, 2), mesh_dim_names=NAMES)

    def known():
        return rt.coordinate, rt.dp_partition, rt.tp_size, rt.ranks("dp"), rt.index("tp"), rt.size()

    before = known()
    assert before == ((2, 1), Partition(4, 2), 2, (1, 3, 5, 7), 1, 8)
    assert not dist.is_initialized()
    with rt:
        assert known() == before
    assert known() == before


def test_the_mesh_waits_until_it_is_asked_for():
    """Entering makes one group, WORLD; the mesh's groups come with its first touch, and all go."""
    arguments = {"mesh_shape": (2, 2, 2), "mesh_dim_names": ("pp", "dp", "tp")}
    with DistributedRuntime("fake", rank=3, world_size=8, **arguments) as rt:
        assert groups() == 1
        assert (rt.dp_partition, rt.tp_size, rt.coordinate) == ((2, 1), 2, (0, 1, 1))
        assert groups() == 1
        mesh = rt.mesh
        assert groups() == 4
        assert rt.mesh is mesh
    assert groups() == 0


def test_submeshes_and_groups_are_the_same_object_each_time():
    """Asked again, by name or by index, a submesh or a group is the identical object."""
    arguments = {"mesh_shape": (2, 2, 2), "mesh_dim_names": ("dp_replicate", "dp_shard", "tp")}
    with DistributedRuntime("fake", rank=5, world_size=8, **arguments) as rt:
        assert rt.submesh("tp") is rt.submesh("tp") is rt.submesh(2) is rt.submesh(-1)
        assert rt.submesh() is rt.mesh is rt.submesh("dp_replicate", "dp_shard", "tp")
        assert rt.submesh("dp_replicate", "dp_shard") is rt.submesh(0, 1)
        assert rt.submesh("dp_replicate", "dp_shard").shape == (2, 2)
        assert rt.group("tp") is rt.group(2) is rt.mesh.get_group("tp")
        assert rt.group() is dist.group.WORLD is rt.group(0, 1, 2)
        spanning = rt.group("dp_replicate", "dp_shard")
        assert spanning is rt.group(0, 1)
        assert tuple(dist.get_process_group_ranks(spanning)) == rt.ranks(0, 1) == (1, 3, 5, 7)


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("shape", [(8,), (2, 4), (4, 1, 2), (1, 8), (2, 2, 2)])
def test_the_mesh_is_the_one_torch_makes(rank, shape):
    """The mesh equals init_device_mesh's: shape, coordinate, and the ranks of every group."""
    names = tuple("abc")[: len(shape)]
    with DistributedRuntime(
        "fake", rank=rank, world_size=8, mesh_shape=shape, mesh_dim_names=names
    ) as rt:
        torchs = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        assert rt.mesh == torchs
        assert tuple(torchs.get_coordinate()) == rt.coordinate
        for name in names:
            ranks = tuple(dist.get_process_group_ranks(torchs.get_group(name)))
            assert tuple(dist.get_process_group_ranks(rt.group(name))) == ranks == rt.ranks(name)
            assert rt.submesh(name) == (torchs[name] if len(shape) > 1 else torchs)
            assert rt.submesh(name).get_local_rank() == rt.index(name)


def test_without_torchs_internals_the_mesh_is_init_device_meshs(monkeypatch):
    """Where torch's helper is not as expected, the mesh comes from init_device_mesh, alike."""
    arguments = {"rank": 5, "world_size": 8, "mesh_shape": (2, 2, 2), "timeout": 77}
    with DistributedRuntime("fake", **arguments, mesh_dim_names=("a", "b", "c")) as rt:
        named = rt.mesh
        assert rt.group("b").group_name.endswith("-b-5")
    monkeypatch.setattr(_torch, "_HELPER_NEEDS", {"a parameter that torch does not have"})
    with DistributedRuntime("fake", **arguments, mesh_dim_names=("a", "b", "c")) as rt:
        assert rt.mesh == named
        assert "-b-" not in rt.group("b").group_name
        assert tuple(dist.get_process_group_ranks(rt.group("a", "b"))) == rt.ranks("a", "b")
    assert groups() == 0


def test_this_torch_makes_named_groups():
    """This torch has what the faster way to a mesh needs."""
    with DistributedRuntime():
        assert _torch.names_groups()


@pytest.mark.parametrize("ask", ["submesh", "group", "index", "size", "ranks"])
@pytest.mark.parametrize("dim", [["dp"], {}, True, 1.0, None, "x"], ids=repr)
def test_what_is_no_dim_is_refused_whatever_was_asked_before(ask, dim):
    """Answers are remembered, but not for what merely equals a dim, or cannot be a key."""
    with DistributedRuntime.simulate(
        5, 8, mesh_shape=(2, 2, 2), mesh_dim_names=("pp", "dp", "tp")
    ) as rt:
        for known in ("dp", 1, "dp", 1, -2):
            assert getattr(rt, ask)(known) == getattr(rt, ask)("dp")
        for _ in range(2):
            with pytest.raises(LayoutError, match="dim"):
                getattr(rt, ask)(dim)


def test_dims_out_of_mesh_order_are_refused():
    """Several dims of a mesh must come in its order; the error gives the order."""
    with DistributedRuntime(mesh_shape=(1, 1), mesh_dim_names=NAMES) as rt:
        for ask in (rt.submesh, rt.group):
            with pytest.raises(LayoutError, match=r"pass \('dp', 'tp'\)"):
                ask("tp", "dp")
            with pytest.raises(LayoutError, match="its dims are dp, tp"):
                ask("cp")


@pytest.mark.parametrize(
    ("names", "dp_mesh_dim", "partition"),
    [
        (("dp", "tp", "x"), None, (2, 1)),
        (("dp_replicate", "dp_shard", "tp"), None, (4, 3)),
        (("a", "b", "tp"), None, (1, 0)),
        (("a", "b", "c"), "b", (2, 1)),
        (("a", "b", "c"), ("c", "a"), (4, 1)),
        (("a", "b", "c"), -1, (2, 0)),
        (None, 1, (2, 1)),
    ],
)
def test_dp_partition_follows_the_names_or_what_is_said(names, dp_mesh_dim, partition):
    """The data is split along the dims that are said, else along those whose names mean it."""
    rt = DistributedRuntime(
        "fake",
        rank=6,
        world_size=8,
        mesh_shape=(2, 2, 2),
        mesh_dim_names=names,
        dp_mesh_dim=dp_mesh_dim,
    )
    assert rt.dp_partition == partition


def test_default_names_do_not_guess_how_data_is_split():
    """With default names for several dims, dp_partition is an error that says what to pass."""
    rt = DistributedRuntime("fake", rank=0, world_size=4, mesh_shape=(2, 2))
    with pytest.raises(LayoutError, match="pass dp_mesh_dim="):
        _ = rt.dp_partition
    assert rt.tp_size == 1


def test_switches():
    """Data that is not sharded is one partition; tensors that are not split are a group of 1."""
    arguments = {"rank": 3, "world_size": 4, "mesh_shape": (2, 2), "mesh_dim_names": NAMES}
    off = DistributedRuntime(
        "fake", **arguments, sharded_by_data_parallel=False, tensor_parallel_enabled=False
    )
    assert (off.dp_partition, off.tp_size) == ((1, 0), 1)
    assert DistributedRuntime("fake", **arguments, tp_mesh_dim="dp").tp_size == 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"mesh_shape": ()},
        {"mesh_shape": (0, 2)},
        {"mesh_shape": (-1, -1)},
        {"mesh_shape": (2, 2), "mesh_dim_names": ("dp",)},
        {"mesh_shape": (2, 2), "mesh_dim_names": ("dp", "dp")},
        {"mesh_dim_names": ("dp", "tp")},
        {"mesh_shape": (2, 2), "dp_mesh_dim": "ep"},
        {"mesh_shape": (2, 2), "dp_mesh_dim": ()},
        {"mesh_shape": (2, 2), "tp_mesh_dim": 2},
        {"timeout": 0},
        {"timeout": float("inf")},
        {"timeout": "60"},
        {"rendezvous_timeout": timedelta(seconds=-1)},
        {"store": dist.HashStore(), "init_method": "env://"},
    ],
)
def test_arguments_that_cannot_be_are_refused_at_once(arguments):
    """A shape, a dim or a time that cannot be is refused by the constructor."""
    with pytest.raises((LayoutError, LaunchEnvironmentError)):
        DistributedRuntime(**arguments)


def test_a_mesh_that_does_not_fit_is_refused_before_anything_starts():
    """A shape that does not fit the world is an error of the layout, and nothing was started."""
    with pytest.raises(LayoutError, match="uses 2 ranks, but world_size=1"):
        DistributedRuntime(mesh_shape=(2,)).open()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(
            {"backend": "nccl"},
            "'nccl' is not available",
            marks=pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has nccl"),
        ),
        ({"backend": "glooo"}, "'glooo' is not available"),
        ({"backend": "cpu:"}, "is not understood"),
        ({"device_type": "cuda", "backend": "gloo"}, "torch sees no such device"),
        ({"device_type": "gpu"}, "torch knows no backend for device_type='gpu'"),
        ({"device_type": "gpu", "backend": "gloo"}, "is no type of device"),
        ({"device": "cuda:0"}, "is not of device_type='cpu'"),
        ({"rank": 0}, "argument rank=0"),
        ({"rank": True, "world_size": 2}, "must be an int"),
        ({"rank": 2, "world_size": 2}, "must be less than"),
        ({"rank": 0, "world_size": 2}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"rank": 0, "world_size": 2, "init_method": "localhost:1"}, "must be a URL"),
        ({"rank": 0, "world_size": 2, "init_method": "tcp://localhost"}, "names no host and port"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a host without GPUs says")
def test_a_launch_that_cannot_be_is_refused_before_any_socket_opens(arguments, says):
    """A launch, a backend or a device that cannot be is refused while no store is open."""
    with pytest.raises(LaunchEnvironmentError, match=says):
        DistributedRuntime(**arguments).open()
    assert not stores._kept
    assert not dist.is_initialized()


def test_an_error_inside_is_what_is_seen():
    """The body's exception leaves the block as it is, with a note of who and where."""
    with pytest.raises(KeyError, match="lost") as caught, DistributedRuntime():
        raise KeyError("lost")
    (note,) = caught.value.__notes__
    assert "rank 0/1 at (dp=0) on " in note
    assert not dist.is_initialized()


def test_an_error_of_closing_does_not_hide_the_one_inside(monkeypatch):
    """Where closing fails too, its error is a note on the body's."""

    def fail():
        raise OSError("no way back")

    monkeypatch.setattr(dist, "destroy_process_group", fail)
    with pytest.raises(KeyError) as caught, DistributedRuntime():
        raise KeyError("lost")
    monkeypatch.undo()
    assert "closing failed: OSError: no way back" in caught.value.__notes__[-1]
    dist.destroy_process_group()


def test_a_life_leaves_nothing_behind():
    """Environment, excepthook and groups are after a life as they were before."""
    environ, hook = dict(os.environ), sys.excepthook
    with DistributedRuntime(mesh_shape=(1, 1), mesh_dim_names=NAMES) as rt:
        _ = rt.mesh
        assert sys.excepthook is not hook
    assert dict(os.environ) == environ
    assert sys.excepthook is hook
    assert groups() == 0


def test_a_start_that_fails_leaves_nothing_behind(monkeypatch):
    """Where torch's start fails its error is seen, nothing is left, and opening again works."""
    hook = sys.excepthook
    rt = DistributedRuntime()
    with monkeypatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rt.open()
    assert rt.state is State.UNOPENED
    assert sys.excepthook is hook
    with rt:
        assert dist.get_world_size() == 1


def test_a_group_that_is_there_is_joined_and_left(bare_group):
    """A group that somebody else made is joined, used, and still there afterwards."""
    with DistributedRuntime(mesh_shape=(1, 1), mesh_dim_names=NAMES) as rt:
        assert not rt.owns_process_group
        assert rt.group() is bare_group
        assert rt.group("tp") is bare_group
        rt.barrier()
    assert dist.group.WORLD is bare_group
    assert groups() == 1


def test_only_our_own_sub_groups_go():
    """Leaving a group that was there destroys the sub-groups that distctx made, and no other."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=_torch.fake_store(), rank=1, world_size=4)
    theirs = dist.new_group([0, 1])
    with DistributedRuntime("fake", mesh_shape=(2, 2), mesh_dim_names=NAMES) as rt:
        _ = rt.mesh
        assert groups() == 4
    assert groups() == 2
    assert dist.get_rank(theirs) == 1
    dist.destroy_process_group()
    sys.excepthook = hook


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rank": 0, "world_size": 2}, "world_size: got 1, wanted 2"),
        ({"rank": 1, "world_size": 2}, "rank: got 0, wanted 1"),
        ({"backend": "nccl"}, "backend: got 'gloo', wanted 'nccl'"),
        ({"backend": "cpu:mpi"}, "backend: got 'gloo', wanted 'cpu:mpi'"),
    ],
)
def test_a_group_that_is_not_what_was_asked_for_is_a_conflict(bare_group, arguments, says):
    """A group that is there and is another than asked for is an error of got and wanted."""
    with pytest.raises(GroupConflictError, match=says):
        DistributedRuntime(**arguments).open()
    assert dist.group.WORLD is bare_group


def test_an_inner_runtime_has_the_outers_mesh():
    """Inside an open runtime, one that asks for no shape has its layout, its mesh and its dims."""
    arguments = {"mesh_shape": (2, 2), "mesh_dim_names": ("a", "b"), "dp_mesh_dim": "a"}
    with DistributedRuntime("fake", rank=3, world_size=4, **arguments) as outer:
        with DistributedRuntime("fake") as inner:
            assert inner.layout == outer.layout
            assert inner.mesh is outer.mesh
            assert inner.dp_partition == outer.dp_partition == (2, 1)
            assert not inner.owns_process_group
            assert not outer.owns_process_group
        assert outer.owns_process_group
        assert groups() == 3
        assert outer.mesh.size() == 4


def test_an_inner_runtime_may_have_a_mesh_of_its_own():
    """Another shape inside gets groups of its own, which go with it."""
    with DistributedRuntime("fake", rank=3, world_size=4, mesh_shape=(4,)) as outer:
        with DistributedRuntime("fake", mesh_shape=(2, 2), mesh_dim_names=NAMES) as inner:
            assert inner.group("tp") is not outer.group("dp")
            assert groups() == 3
        assert groups() == 1


def test_the_last_to_close_ends_the_world():
    """A world that distctx made stays until the last runtime that holds it is closed."""
    outer = DistributedRuntime().open()
    inner = DistributedRuntime().open()
    outer.close()
    assert dist.is_initialized()
    assert inner.owns_process_group
    inner.close()
    assert not dist.is_initialized()


def test_a_group_destroyed_from_under_a_runtime_is_no_error_of_closing():
    """Closing after somebody destroyed the group is quiet, and a mesh is refused."""
    hook = sys.excepthook
    with DistributedRuntime() as rt:
        dist.destroy_process_group()
        with pytest.raises(RuntimeStateError, match="destroyed by somebody else"):
            _ = rt.mesh
    assert sys.excepthook is hook
    with DistributedRuntime():
        assert dist.is_initialized()


@pytest.mark.parametrize("shape", [None, (1,)])
def test_a_mesh_kept_from_a_closed_life_finds_no_group_in_the_next(shape):
    """A raw mesh that was kept is not answered with the next life's groups."""
    with DistributedRuntime(mesh_shape=shape) as rt:
        kept = rt.mesh
        assert kept.get_group() is dist.group.WORLD
    with DistributedRuntime(mesh_shape=shape), pytest.raises(Exception, match=r"resolve|Invariant"):
        kept.get_group()


def test_repr_tells_the_state():
    """The repr is one line that says state, place, backend, device, whose group, and the mesh."""
    rt = DistributedRuntime("fake", rank=5, world_size=8, mesh_shape=(-1, 2), mesh_dim_names=NAMES)
    assert repr(rt) == "DistributedRuntime(unopened, rank 5/8 at (dp=2, tp=1))"
    with rt:
        where = "open, rank 5/8 at (dp=2, tp=1), fake on cpu, owns group, simulated"
        assert repr(rt) == f"DistributedRuntime({where}, mesh not built)"
        _ = rt.mesh
        assert repr(rt) == f"DistributedRuntime({where}, mesh built)"
    assert repr(rt) == "DistributedRuntime(closed, rank 5/8 at (dp=2, tp=1))"
    assert repr(DistributedRuntime(rank=3)) == "DistributedRuntime(unopened, rank not known)"


def test_looking_builds_nothing():
    """Reading every name that dir shows makes no group; the mesh is shown once it is built."""
    with DistributedRuntime("fake", rank=1, world_size=4, mesh_shape=(2, 2)) as rt:
        for name in dir(rt):
            with contextlib.suppress(DistctxError):
                getattr(rt, name)
        assert groups() == 1
        assert "mesh" not in dir(rt)
        _ = rt.mesh
        assert "mesh" in dir(rt)


def test_describe_tells_of_any_rank_in_eighty_columns():
    """describe() is a table of at most 80 columns about this rank or any other, before opening
    too."""
    rt = DistributedRuntime(
        "fake", rank=5, world_size=4096, mesh_shape=(-1, 8), mesh_dim_names=NAMES
    )
    mine, other = rt.describe(), rt.describe(4095)
    assert mine.coordinate == {"dp": 0, "tp": 5}
    assert other.coordinate == {"dp": 511, "tp": 7}
    assert other.dp_partition == (512, 511)
    lines = str(mine).splitlines()
    assert max(map(len, lines)) <= 80
    assert "dp=0          with 5, 13, 21, 29, 37, 45, …, 4093" in lines
    with pytest.raises(LayoutError, match="rank=4096 is outside"):
        rt.describe(4096)


def test_settings_stay_as_they_were_given():
    """What the caller set cannot be changed on a runtime afterwards."""
    rt = DistributedRuntime(mesh_shape=(1,))
    with pytest.raises(AttributeError):
        rt.mesh_shape = (2,)
    assert rt == rt
    assert rt != DistributedRuntime(mesh_shape=(1,))
    assert len({rt, rt}) == 1


def test_a_store_of_the_callers_is_used():
    """Ranks meet in a store that is given, and it stays as it is for the next life."""
    store = dist.HashStore()
    for _ in range(3):
        with DistributedRuntime(rank=0, world_size=1, store=store, timeout=5):
            dist.barrier()
    assert store.add("distctx/rooms", 0) == 3


def test_a_file_is_used(tmp_path):
    """Ranks meet through a file: URL, life after life."""
    url = f"file://{tmp_path}/store"
    for _ in range(3):
        with DistributedRuntime(rank=0, world_size=1, init_method=url, timeout=5):
            dist.barrier()
    with pytest.raises(Exception, match="No such file or directory"):
        DistributedRuntime(rank=0, world_size=1, init_method=f"file://{tmp_path}/no/store").open()


def test_timeouts_reach_the_groups():
    """The timeout is the world's and every sub-group's."""
    with DistributedRuntime("fake", rank=1, world_size=4, mesh_shape=(2, 2), timeout=12.5):
        pass
    with DistributedRuntime(timeout=timedelta(seconds=12.5)):
        assert _torch.group_timeout(dist.group.WORLD) == timedelta(seconds=12.5)


def test_main_first_alone_just_runs():
    """In a world of 1 main_first runs the body, and lets its error out."""
    with DistributedRuntime() as rt:
        with rt.main_first():
            pass
        with pytest.raises(KeyError), rt.main_first(local=True):
            raise KeyError


def script(text: str, *options: str) -> tuple[str, str]:
    """What a script prints on stdout and stderr; it must exit with 0."""
    done = run(*options, "-c", text)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_runtime_that_is_never_closed_is_closed_at_the_end():
    """A script that forgets to close is warned of it once, and its group is ended for it."""
    text = (
        "import atexit, torch.distributed as dist\n"
        "atexit.register(lambda: print('at the end', dist.is_initialized()))\n"
        "from distctx import DistributedRuntime\n"
        "rt = DistributedRuntime().open()\n"
    )
    printed, warned = script(text, "-W", "always::ResourceWarning")
    assert printed == "at the end False\n"
    assert warned.count("ResourceWarning") == 1
    assert "was never closed; use it in a `with` block" in warned
    assert "destroy_process_group" not in warned
    assert script(text)[1] == ""


def test_a_cell_that_is_run_again_leaves_one_world():
    """Opening again under the same name joins the world that is there; closing the last ends it."""
    groups_there = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(20):
            rt = DistributedRuntime(mesh_shape=(1,), mesh_dim_names=("tp",)).open()
            groups_there.add((id(rt.group()), id(rt.mesh), groups()))
    assert len(groups_there) == 1
    assert len(caught) == 19
    assert rt.owns_process_group
    rt.close()
    assert not dist.is_initialized()


def test_what_was_built_outlives_a_runtime_that_was_dropped():
    """A mesh that is kept while its runtime is dropped goes on working."""
    with pytest.warns(ResourceWarning, match="never closed"):
        mesh = DistributedRuntime().open().mesh
    assert mesh.get_group() is dist.group.WORLD
    with DistributedRuntime() as rt:
        assert rt.mesh is mesh
    assert not dist.is_initialized()


def test_a_world_of_one_listens_on_loopback_only():
    """A world of 1 listens on loopback alone, and the environment is as it was."""
    text = (
        "import os\n"
        "from distctx import DistributedRuntime\n"
        "with DistributedRuntime():\n"
        "    mine = {os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')\n"
        "            if os.path.islink(f'/proc/self/fd/{fd}')}\n"
        "    for table in ('tcp', 'tcp6'):\n"
        "        for line in open(f'/proc/self/net/{table}').readlines()[1:]:\n"
        "            fields = line.split()\n"
        "            if fields[3] == '0A' and f'socket:[{fields[9]}]' in mine:\n"
        "                print(fields[1].rpartition(':')[0])\n"
        "    print('GLOO_SOCKET_IFNAME' in os.environ)\n"
    )
    *sockets, is_set = script(text)[0].split()
    assert sockets
    assert set(sockets) <= {"0100007F", "00000000000000000000000001000000"}
    assert is_set == "False"


def test_a_clean_exit_inside_is_no_failure(monkeypatch):
    """sys.exit(0) in the block closes as usual; another status is a failure, and keeps its code."""
    aborted = []
    release = world.Hold.release

    def seen(self, *, abort):
        aborted.append(abort)
        release(self, abort=abort)

    monkeypatch.setattr(world.Hold, "release", seen)
    for code in (0, 3):
        with pytest.raises(SystemExit) as caught, DistributedRuntime():
            sys.exit(code)
        assert caught.value.code == code
    assert aborted == [False, True]


def test_nested_runtimes_note_once():
    """An error that leaves several runtimes has one note of who and where."""
    with pytest.raises(KeyError) as caught, DistributedRuntime(), DistributedRuntime():
        raise KeyError
    assert len(caught.value.__notes__) == 1


def test_a_child_forgets_its_parents_world():
    """A forked child that leaves its parent's block ends at once, and the parent's world stands."""
    text = (
        "import os, sys, torch, torch.distributed as dist\n"
        "from distctx import DistributedRuntime\n"
        "with DistributedRuntime() as rt:\n"
        "    rt.mesh; dist.all_reduce(torch.ones(1))\n"
        "    if (pid := os.fork()) == 0:\n"
        "        sys.exit(5)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "    dist.all_reduce(torch.ones(1))\n"
    )
    assert script(text, "-W", "ignore::DeprecationWarning")[0] == "5\n"


def test_threads_find_one_world_and_one_mesh():
    """Threads that open and touch at once share one world and one mesh."""
    with ThreadPoolExecutor(8) as pool:
        runtimes = list(pool.map(lambda _: DistributedRuntime().open(), range(8)))
        meshes = {id(mesh) for mesh in pool.map(lambda rt: rt.mesh, runtimes)}
    assert len(meshes) == 1
    assert groups() == 1
    for rt in runtimes:
        rt.close()
    assert not dist.is_initialized()


def test_an_unopened_runtime_inside_answers_for_itself():
    """Inside an open world, a runtime with a rank and a size of its own answers for those."""
    arguments = {"mesh_shape": (-1, 2), "mesh_dim_names": NAMES}
    with DistributedRuntime("fake", rank=0, world_size=8, **arguments):
        other = DistributedRuntime("fake", rank=5, world_size=16, **arguments)
        assert (other.rank, other.world_size, other.coordinate) == (5, 16, (2, 1))
        assert (other.environment.rank, other.environment.world_size) == (5, 16)
        same = DistributedRuntime()
        assert (same.world_size, same.environment.world_size, same.tp_size) == (8, 8, 2)


def test_who_this_is_stays_known_after_a_joined_world():
    """After closing, rank, environment and local rank agree about the world that was joined."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=_torch.fake_store(), rank=3, world_size=4)
    with DistributedRuntime("fake") as rt:
        pass
    dist.destroy_process_group()
    sys.excepthook = hook
    assert (rt.rank, rt.environment.rank, rt.environment.world_size) == (3, 3, 4)
    with pytest.raises(RuntimeStateError, match="does not say which rank of its host"):
        _ = rt.local_rank


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"init_method": "tcp://h:1", "rank": 0, "world_size": 1}, "init_method: a group that is"),
        ({"store": dist.HashStore()}, "store: a group that is there takes none"),
    ],
)
def test_what_a_joined_group_cannot_honour_is_a_conflict(bare_group, arguments, says):
    """What was asked and cannot be had of the group that is there is not dropped in silence."""
    with pytest.raises(GroupConflictError, match=says):
        DistributedRuntime(**arguments).open()


@pytest.mark.parametrize("arguments", [{"device": "cuda:3"}, {"device_type": "cuda"}])
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a host without GPUs says")
def test_a_device_that_a_joined_world_has_not(arguments):
    """A device that the world does not have is refused, whoever made the world."""
    with DistributedRuntime(), pytest.raises(GroupConflictError, match="got 'cpu', wanted 'cuda'"):
        DistributedRuntime(**arguments).open()
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(LaunchEnvironmentError, match="cuda"):
        DistributedRuntime(**arguments).open()
    dist.destroy_process_group()
    sys.excepthook = hook


def test_a_joined_runtime_has_its_own_times():
    """A runtime that joins gives its own timeouts to what it builds."""
    with DistributedRuntime("fake", rank=1, world_size=4, timeout=30) as outer:
        arguments = {"mesh_shape": (2, 2), "timeout": 12, "rendezvous_timeout": 3}
        with DistributedRuntime("fake", **arguments) as inner:
            cache = inner._hold.cache
            assert (cache.timeout.seconds, cache.rendezvous_timeout.seconds) == (12, 3)
        assert outer._hold.cache.timeout.seconds == 30


def test_the_layouts_half_needs_no_torch():
    """What follows from rank and shape is answered without importing torch."""
    text = (
        "import sys\n"
        "from distctx import DistributedRuntime\n"
        "rt = DistributedRuntime('gloo', rank=5, world_size=8, mesh_shape=(-1, 2),\n"
        "                        mesh_dim_names=('dp', 'tp'))\n"
        "print(rt.dp_partition.partition_index, rt.tp_size, rt, 'torch' in sys.modules)\n"
    )
    assert script(text)[0] == ("2 2 DistributedRuntime(unopened, rank 5/8 at (dp=2, tp=1)) False\n")


@pytest.fixture
def nccl(monkeypatch):
    """An open runtime with a mesh whose world believes that it is NCCL's, since there is no GPU
    here: only what it decides is tested. Gives it, and the calls that end groups."""
    calls, answer = [], threading.Event()
    threads = set(threading.enumerate())

    def ends(name, hangs):
        def end(*groups):
            calls.append((name, len(groups)))
            if name in hangs:
                answer.wait(20)
            elif name == "abort":
                answer.set()  # it frees a destroy that hangs

        return end

    def hang(*hangs):
        monkeypatch.setattr(dist, "destroy_process_group", ends("destroy", hangs))
        monkeypatch.setattr(_torch.c10d, "_abort_process_group", ends("abort", hangs))

    destroy = dist.destroy_process_group
    arguments = {"rank": 1, "world_size": 4, "mesh_shape": (2, 2), "mesh_dim_names": NAMES}
    rt = DistributedRuntime("fake", timeout=1.0, **arguments).open()
    _ = rt.mesh
    monkeypatch.setattr("distctx.world._ABORT_BOUND", 1.0)
    rt._hold.world.backend = "nccl"
    yield rt, hang, calls
    answer.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)  # one that was given up must not go on into the next test
    rt.close(abort=True)
    destroy()


@pytest.mark.parametrize(
    ("abort", "hangs", "called", "said"),
    [
        (False, (), ["destroy"], []),
        (False, ("destroy",), ["destroy", "abort"], ["destroyed"]),
        (False, ("destroy", "abort"), ["destroy", "abort"], ["destroyed", "aborted", "left"]),
        (True, (), ["abort"], []),
        (True, ("abort",), ["abort"], ["aborted", "left"]),
    ],
)
@pytest.mark.parametrize("owned", [True, False])
def test_nccl_ends_in_bounds(nccl, caplog, abort, hangs, called, said, owned):
    """With NCCL what failed is aborted, never destroyed; a destroy or an abort that does not come
    back is given up after its bound. So for the world as for sub-groups of one that is left."""
    rt, hang, calls = nccl
    hang(*hangs)
    rt._hold.world.owned = owned
    start = time.monotonic()
    rt.close(abort=abort)
    assert time.monotonic() - start < 10
    if owned:
        assert calls == [(name, 0) for name in called]
    else:
        assert set(calls) == {(name, 1) for name in called}
        # Of two sub-groups: an abort that hangs does not go on; a destroy that it frees does.
        assert len(calls) == (1 if "abort" in hangs else 2) * len(called)
    assert [next(w for w in said if w in r.message) for r in caplog.records] == said


def test_nccl_at_exit_needs_no_thread(nccl, monkeypatch):
    """At the interpreter's end, when no thread can start, the groups are aborted all the same."""
    rt, hang, calls = nccl
    hang()
    monkeypatch.setattr("distctx.world._exiting", True)
    monkeypatch.setattr(threading.Thread, "start", lambda _: 1 / 0)
    rt._hold.world.end(abort=True)
    assert calls == [("abort", 0)]


def test_an_abort_that_fails_is_a_note(nccl, monkeypatch):
    """The body's own exception is what is seen; that the abort failed too is attached to it."""
    rt, hang, _ = nccl
    hang()
    monkeypatch.setattr(_torch.c10d, "_abort_process_group", lambda: 1 / 0)
    stack = contextlib.ExitStack()
    stack.push(rt)
    with pytest.raises(KeyError) as caught, stack:
        raise KeyError("the body's")
    assert "ZeroDivisionError" in caught.value.__notes__[-1]


def test_names_that_mean_nothing_are_warned_of(caplog):
    """Names without a known data-parallel dim are warned of: every rank then reads all the data."""
    for names, warns in ((("data", "tp"), True), (("pp", "tp"), False), (("dp", "x"), False)):
        caplog.clear()
        with DistributedRuntime(
            "fake", rank=0, world_size=4, mesh_shape=(2, 2), mesh_dim_names=names
        ):
            pass
        assert ("dp_mesh_dim=" in caplog.text) == warns


def test_an_open_runtime_is_not_pickled():
    """An open runtime refuses to be pickled and says what to pass; a closed one answers."""
    with DistributedRuntime() as rt:
        with pytest.raises(RuntimeStateError, match="Pass what needs no other rank"):
            pickle.dumps(rt)
        assert pickle.loads(pickle.dumps(rt.dp_partition)) == rt.dp_partition
    assert pickle.loads(pickle.dumps(rt)).coordinate == rt.coordinate


def test_a_child_may_ask_what_needs_no_other_rank():
    """A forked child has the layout's answers, and is refused what would talk to other ranks."""
    text = (
        "import os\n"
        "from distctx import DistributedRuntime, RuntimeStateError\n"
        "rt = DistributedRuntime().open()\n"
        "rt.mesh, rt.group('dp')\n"
        "if (pid := os.fork()) == 0:\n"
        "    refused = 0\n"
        "    for ask in (lambda: rt.mesh, lambda: rt.group('dp'), rt.barrier, rt.main_first):\n"
        "        try:\n"
        "            ask()\n"
        "        except RuntimeStateError as error:\n"
        "            refused += 'child of the process' in str(error)\n"
        "    os._exit(refused + rt.dp_partition.num_partitions)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "rt.close()\n"
    )
    assert script(text, "-W", "ignore::DeprecationWarning")[0] == "5\n"


def test_a_barrier_without_a_group_says_so():
    """A barrier after somebody destroyed the group is an error of distctx that says so."""
    hook = sys.excepthook
    with DistributedRuntime() as rt:
        dist.destroy_process_group()
        with pytest.raises(RuntimeStateError, match="destroyed by somebody else"):
            rt.barrier()
    assert sys.excepthook is hook


def test_a_shape_in_the_place_of_the_backend_is_refused():
    """A mesh shape passed first, where the backend belongs, is refused at once."""
    with pytest.raises(
        LaunchEnvironmentError, match="pass mesh_shape= and mesh_dim_names= by name"
    ):
        DistributedRuntime((-1, 2), ("dp", "tp"))
