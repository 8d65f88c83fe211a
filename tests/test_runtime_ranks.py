"""DistributedRuntime on 2 and 4 real gloo ranks under torchrun. The bodies are in bodies.py."""

from __future__ import annotations

from typing import Any

import pytest

from distctx import MeshLayout
from launch import run_bodies, value_of

BODIES = (
    "everything",
    "spanning",
    "lives",
    "empty_lives",
    "uneven_lives",
    "disagree_on_the_shape",
    "disagree_on_the_backend",
    "a_rank_is_absent",
    "rank_zero_is_absent",
    "touched_by_some",
    "touched_for_different_things",
    "joined",
    "first",
    "first_in_a_joined_group",
    "barrier_names_the_absent",
    "local_ranks_are_found",
    "a_rank_taken_twice",
    "progress_is_logged",
    "everything",
)


@pytest.fixture(scope="module", params=[2, 4])
def nproc(request: pytest.FixtureRequest) -> int:
    """The number of ranks."""
    return request.param


@pytest.fixture(scope="module")
def results(nproc: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What every body gave, all run in one torchrun job, life after life on the launcher's
    store."""
    return run_bodies("bodies", BODIES, nproc, tmp_path_factory.mktemp("ranks"))


def test_everything_is_in_its_place(results, nproc):
    """Under torchrun each rank has its coordinate, partition and groups, and they communicate."""
    layout = MeshLayout((-1, 2), ("dp", "tp")).resolve(nproc)
    for rank, told in enumerate(value_of(results, "everything")):
        dims = {name: list(layout.ranks(rank, name)) for name in ("dp", "tp")}
        assert told == {
            "rank": rank,
            "local_rank": rank,
            "launcher": "torchrun",
            "backend": "gloo",
            "device": "cpu",
            "coordinate": list(layout.coordinate(rank)),
            "dp_partition": list(layout.partition(rank, "dp")),
            "tp_size": 2,
            "groups_before_the_mesh": 1,
            "sums": {name: sum(ranks) for name, ranks in dims.items()},
            "ranks": dims,
            "order": list(dims.values()),
            "same": True,
            "equal": True,
            "timeout": 30,
            "groups_after": 0,
        }


def test_a_sub_mesh_and_a_group_of_several_dims(results, nproc):
    """A sub-mesh of two dims serves HSDP; a group may span two dims; replicate × shard split the
    data."""
    for rank, told in enumerate(value_of(results, "spanning")):
        assert told["hsdp"] == [nproc // 2, 2]
        assert told["ranks"] == [r for r in range(nproc) if r % 2 == rank % 2]
        assert told["sum"] == sum(told["ranks"])
        assert told["partition"] == [nproc, rank]
        assert told["same"]


def test_life_after_life(results):
    """Ten lives in one job, with other shapes and pauses, all compute right."""
    for sums in value_of(results, "lives"):
        assert len(sums) == 10
        assert all(got == wanted for got, wanted in sums)


def test_lives_that_end_as_they_begin(results, nproc):
    """A rank that leaves at once does not cut off peers that are still connecting."""
    assert value_of(results, "empty_lives") == [49] * nproc


def test_ranks_that_lived_differently_meet(results, nproc):
    """Ranks that had a different number of lives before still meet."""
    assert value_of(results, "uneven_lives") == [nproc * (nproc - 1) // 2] * nproc


def test_another_shape_is_an_error_on_every_rank(results, nproc):
    """Ranks that ask for different shapes all get the shapes by rank, at once, and can start
    again."""
    for told in value_of(results, "disagree_on_the_shape"):
        assert told["type"] == "RankDisagreementError"
        assert told["seconds"] < 2
        shapes = {rank: value["mesh_shape"] for rank, value in told["values"].items()}
        expected = {str(rank): [nproc // 2, 2] for rank in range(nproc - 1)}
        assert shapes == expected | {str(nproc - 1): [nproc, 1]}
        assert told["then"] == nproc * (nproc - 1) // 2


def test_another_backend_is_an_error_on_every_rank(results, nproc):
    """Ranks that ask for different backends all get the backends by rank."""
    for told in value_of(results, "disagree_on_the_backend"):
        assert told["type"] == "RankDisagreementError"
        assert told["values"]["0"] == {"backend": "cpu:gloo"}
        assert told["values"]["1"] == {"backend": "gloo"}


def test_an_absent_rank_is_named(results, nproc):
    """Each rank that came names the one that did not; the late one does not start alone."""
    *came, late = value_of(results, "a_rank_is_absent")
    for told in came:
        assert told["type"] == "RendezvousTimeoutError"
        assert told["missing"] == [nproc - 1]
        assert "rank 0 (" in told["text"]
        assert 0.9 < told["seconds"] < 4
    assert late["type"] == "RendezvousTimeoutError"
    assert "failed before this rank came" in late["text"]
    assert late["then"] == nproc * (nproc - 1) // 2


def test_rank_zero_absent_is_said(results, nproc):
    """Without rank 0 the others say that it is rank 0, after the rendezvous timeout."""
    _, *others = value_of(results, "rank_zero_is_absent")
    for told in others:
        assert told["type"] == "RendezvousTimeoutError"
        assert told["missing"] == [0]
        assert 0.9 < told["seconds"] < 4
        assert told["then"] == nproc * (nproc - 1) // 2


def test_a_mesh_that_some_do_not_touch_is_an_error(results, nproc):
    """A first touch that some ranks do not join names them, and can be done again by all."""
    *came, _ = told = value_of(results, "touched_by_some")
    for one in came:
        assert one["type"] == "RendezvousTimeoutError"
        assert one["missing"] == [nproc - 1]
        assert "build the mesh" in one["text"]
    for one in told:
        assert one["then"] == sum(one["ranks"])


def test_touching_different_meshes_is_an_error(results):
    """Ranks that touch different meshes at once all get what each of them built."""
    for told in value_of(results, "touched_for_different_things"):
        assert told["type"] == "RankDisagreementError"
        assert told["values"]["0"]["mesh_dim_names"] == ["x"]
        assert told["values"]["1"]["mesh_dim_names"] == ["dp", "tp"]
        assert told["then"] == sum(told["ranks"])


def test_a_group_of_torchs_is_joined(results, nproc):
    """A world that torch made is joined, meets for its mesh, and stands afterwards."""
    for told in value_of(results, "joined"):
        assert told["owns"] is False
        assert told["inside"] == (3 if nproc == 4 else 2)
        assert (told["after"], told["still"]) == (1, nproc)


def test_main_first(results):
    """The others wait longer than the group's timeout, and get the main rank's failure."""
    main, *others = value_of(results, "first")
    assert main["waited"] < 1
    assert main["error"]["type"] == "KeyError"
    for told in others:
        assert told["waited"] > 1.4
        assert told["error"]["type"] == "RemoteRankError"
        assert "KeyError: 'no such file'" in told["error"]["text"]


def test_main_first_in_a_joined_group(results):
    """A group that is joined again has its turns counted on: the main rank goes first each time."""
    main, *others = value_of(results, "first_in_a_joined_group")
    assert max(main) < 0.4
    for waited in others:
        assert min(waited) > 0.4


def test_a_barrier_names_the_absent(results, nproc):
    """On gloo, the main rank's error at a barrier names the rank that did not come."""
    main = value_of(results, "barrier_names_the_absent")[0]
    assert f"Ranks {nproc - 1} failed to pass monitoredBarrier" in main["text"]
    assert (main["type"], main["missing"]) == ("RendezvousTimeoutError", [nproc - 1])


def test_local_ranks_are_found_out(results, nproc):
    """RANK and WORLD_SIZE alone are a launch; the local rank comes from who else is on this
    host."""
    wanted = [["RuntimeStateError", rank, nproc] for rank in range(nproc)]
    assert value_of(results, "local_ranks_are_found") == wanted


def test_a_rank_taken_twice_names_both(results, nproc):
    """Two processes with one rank: every process is told, and both are named."""
    told = value_of(results, "a_rank_taken_twice")
    holders = {told[-2]["pid"], told[-1]["pid"]}
    for one in told:
        assert one["type"] == "RendezvousError"
        assert f"claim rank {nproc - 2}" in one["text"]
        assert all(f"pid {pid}" in one["text"] for pid in holders)
        assert one["then"] == nproc * (nproc - 1) // 2


def test_the_main_rank_says_for_whom_it_waits(results, nproc):
    """While it waits, the main rank logs who is absent and how long it will wait."""
    lines, *others = value_of(results, "progress_is_logged")
    absent = ", ".join(map(str, range(1, nproc)))
    assert lines[0] == (
        f"waiting for {nproc - 1} of {nproc} ranks: {absent} (0 s of 30 s) to start the world"
    )
    assert not any(others)
