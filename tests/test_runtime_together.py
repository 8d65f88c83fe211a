"""DistributedRuntime on 2 and 4 real gloo ranks: worlds that meet, and worlds that do not."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distctx import (
    DistctxError,
    DistributedRuntime,
    RankDisagreementError,
    RemoteRankError,
    RendezvousError,
    RendezvousTimeoutError,
    _torch,
    progress,
)

pytestmark = pytest.mark.distributed([2, 4], detail=False, timeout=60)

MESH: dict[str, Any] = {"mesh_shape": (-1, 2), "mesh_dim_names": ("dp", "tp")}
#: Seconds that a busy machine may add to any bound.
SLACK = 3.0


class Me:
    """Who this rank is, before there is any runtime."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.is_last = self.rank == self.size - 1


@pytest.fixture
def me() -> Me:
    """Who this rank is."""
    return Me()


@pytest.fixture
def world(make_distributed_runtime) -> Callable[..., DistributedRuntime]:
    """Make runtimes with bounds that suit a test."""

    def make(**arguments: Any) -> DistributedRuntime:
        return make_distributed_runtime(**{"timeout": 30, "rendezvous_timeout": 30} | arguments)

    return make


def total(value: int, group: Any = None) -> int:
    """The sum of the ranks' values."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def require_that_all_meet(world: Callable[..., DistributedRuntime], me: Me) -> None:
    """After what failed, a new life begins."""
    with world() as rt:
        assert total(rt.rank) == sum(range(me.size))


def test_a_sub_mesh_and_a_group_of_several_dims(world, me):
    """A sub-mesh of two dims serves HSDP; a group may span two; both split the data."""
    names = ("dp_replicate", "dp_shard", "tp")
    with world(mesh_shape=(-1, 2, 1), mesh_dim_names=names) as rt:
        group = rt.group("dp_replicate", "tp")
        others = [rank for rank in range(me.size) if rank % 2 == me.rank % 2]
        assert rt.submesh("dp_replicate", "dp_shard").shape == (me.size // 2, 2)
        assert list(rt.ranks("dp_replicate", "tp")) == others
        assert total(rt.rank, group) == sum(others)
        assert rt.dp_partition == (me.size, me.rank)
        assert group is rt.group("dp_replicate", "tp")


def test_another_shape_is_an_error_on_every_rank(world, me):
    """Ranks that ask for different shapes all get the shapes by rank, at once; then they start."""
    start = time.monotonic()
    with pytest.raises(RankDisagreementError) as caught:
        world(mesh_shape=(-1, 1 if me.is_last else 2), mesh_dim_names=("dp", "tp")).open()
    assert time.monotonic() - start < 2 + SLACK
    shapes = {rank: list(values["mesh_shape"]) for rank, values in caught.value.values.items()}
    wanted = {rank: [me.size // 2, 2] for rank in range(me.size - 1)}
    assert shapes == wanted | {me.size - 1: [me.size, 1]}
    require_that_all_meet(world, me)


def test_another_backend_is_an_error_on_every_rank(world, me):
    """Ranks that ask for different backends all get the backends by rank."""
    with pytest.raises(RankDisagreementError) as caught:
        world(backend="gloo" if me.rank else "cpu:gloo").open()
    assert caught.value.values[0] == {"backend": "cpu:gloo"}
    assert caught.value.values[1] == {"backend": "gloo"}


def test_an_absent_rank_is_named(world, me):
    """Each rank that came names the one that did not; the late one does not start alone."""
    time.sleep(1.5 if me.is_last else 0)
    start = time.monotonic()
    with pytest.raises(RendezvousTimeoutError) as caught:
        world(rendezvous_timeout=1.0).open()
    if me.is_last:
        assert "failed before this rank came" in str(caught.value)
    else:
        assert 0.9 < time.monotonic() - start < 1 + SLACK
        assert list(caught.value.missing_ranks) == [me.size - 1]
        assert "rank 0 (" in str(caught.value)
    time.sleep(2)
    require_that_all_meet(world, me)


def test_rank_zero_absent_is_said(world, me):
    """Without rank 0 the others say that it is rank 0, after the rendezvous timeout."""
    if me.rank == 0:
        time.sleep(1.5)
    else:
        start = time.monotonic()
        with pytest.raises(RendezvousTimeoutError) as caught:
            world(rendezvous_timeout=1.0).open()
        assert list(caught.value.missing_ranks) == [0]
        assert 0.9 < time.monotonic() - start < 1 + SLACK
    require_that_all_meet(world, me)


def test_a_mesh_that_some_do_not_touch_is_an_error(world, me):
    """A first touch that some ranks do not join names them, and can be done again by all."""
    with world(**MESH, rendezvous_timeout=1.0) as rt:
        if not me.is_last:
            with pytest.raises(RendezvousTimeoutError, match="build the mesh") as caught:
                _ = rt.mesh
            assert list(caught.value.missing_ranks) == [me.size - 1]
        dist.barrier()
        assert total(rt.rank, rt.group("tp")) == sum(rt.ranks("tp"))


def test_touching_different_meshes_is_an_error(world, me):
    """Ranks that touch different meshes at once all get what each of them built."""
    with world(**MESH) as rt:
        with (
            DistributedRuntime(mesh_shape=(-1,), mesh_dim_names=("x",)) as inner,
            pytest.raises(RankDisagreementError) as caught,
        ):
            _ = rt.mesh if me.rank else inner.submesh("x")
        assert list(caught.value.values[0]["mesh_dim_names"]) == ["x"]
        assert list(caught.value.values[1]["mesh_dim_names"]) == ["dp", "tp"]
        assert total(rt.rank, rt.group("tp")) == sum(rt.ranks("tp"))


@pytest.fixture
def of_torch(me, shared_tmp_path):
    """A world that torch made; torch leaves its excepthook behind, which conftest.py minds."""
    hook = sys.excepthook
    place = f"file://{shared_tmp_path}/torch"
    dist.init_process_group("gloo", init_method=place, rank=me.rank, world_size=me.size)
    yield
    dist.destroy_process_group()
    sys.excepthook = hook


def test_a_group_of_torchs_is_joined(of_torch, me):
    """A world that torch made is joined, meets for its mesh, and stands afterwards."""
    with DistributedRuntime(**MESH, rendezvous_timeout=30) as rt:
        assert not rt.owns_process_group
        assert total(rt.rank, rt.group("tp")) == sum(rt.ranks("tp"))
        assert _torch.number_of_groups() == (3 if me.size == 4 else 2)
    assert _torch.number_of_groups() == 1
    assert total(1) == me.size


def test_main_first(world, me):
    """The others wait longer than the group's timeout, and get the main rank's failure."""
    with world(timeout=1.0) as rt:
        start = time.monotonic()
        with rt.main_first():
            waited = time.monotonic() - start
            time.sleep(0 if me.rank else 1.5)
        assert waited > 1.4 if me.rank else waited < 1
        with rt.main_first(local=True):
            pass
        error = pytest.raises(RemoteRankError if me.rank else KeyError, match="no such file")
        with error, rt.main_first():
            if me.rank == 0:
                raise KeyError("no such file")


def test_main_first_in_a_joined_group(of_torch, me):
    """A group that is joined again has its turns counted on: the main rank goes first each time."""
    for life in range(2):
        dist.barrier()
        with DistributedRuntime(rendezvous_timeout=30) as rt:
            start = time.monotonic()
            with rt.main_first():
                waited = time.monotonic() - start
                time.sleep(0 if me.rank else 0.5)
            assert waited > 0.4 if me.rank else waited < 0.4
            if life == 0:
                with contextlib.suppress(KeyError, RemoteRankError), rt.main_first(local=True):
                    raise KeyError


def test_a_barrier_names_the_absent(world, me):
    """On gloo, the main rank's error at a barrier names the rank that did not come."""
    with world(timeout=1.0) as rt:
        if me.is_last:
            time.sleep(2)
            return
        with pytest.raises(DistctxError) as caught:
            rt.barrier()
        if me.rank == 0:
            assert f"Ranks {me.size - 1} failed to pass monitoredBarrier" in str(caught.value)
            assert isinstance(caught.value, RendezvousTimeoutError)
            assert list(caught.value.missing_ranks) == [me.size - 1]


def test_a_rank_taken_twice_names_both(world, me, shared_tmp_path):
    """Two processes with one rank: every process is told, and both are named."""
    twice = me.size - 2
    rank = twice if me.is_last else me.rank
    if rank == twice:
        (shared_tmp_path / f"pid {os.getpid()}").touch()
    with pytest.raises(RendezvousError, match=f"claim rank {twice}") as caught:
        world(timeout=5, rank=rank).open()
    time.sleep(1)
    holders = [path.name for path in shared_tmp_path.glob("pid *")]
    assert len(holders) == 2
    assert all(holder in str(caught.value) for holder in holders)
    require_that_all_meet(world, me)


def test_the_main_rank_says_for_whom_it_waits(world, me, caplog, monkeypatch):
    """While it waits, the main rank logs who is absent and how long it will wait."""
    if me.rank == 0:
        monkeypatch.setattr(progress, "_REPORT_AFTER", 0.2)
    else:
        time.sleep(1.0)
    with caplog.at_level(logging.INFO, "distctx"), world():
        pass
    lines = [record.getMessage() for record in caplog.records if record.name == "distctx"]
    if me.rank:
        assert not lines
        return
    absent = ", ".join(map(str, range(1, me.size)))
    assert lines[0] == (
        f"waiting for {me.size - 1} of {me.size} ranks: {absent} (0 s of 30 s) to start the world"
    )
