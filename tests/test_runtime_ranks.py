"""DistributedRuntime on 2 and 4 real gloo ranks under torchrun, whose store outlives every world.

The bodies are in bodies.py; test_runtime_together.py has what needs no launcher.
"""

from __future__ import annotations

from typing import Any

import pytest

from distctx import MeshLayout
from launch import run_bodies, value_of

BODIES = (
    "everything",
    "lives",
    "empty_lives",
    "failing_life",
    "lives_with_dtensor",
    "own_store_is_lost",
    "uneven_lives",
    "local_ranks_are_found",
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


def test_life_after_life(results):
    """Ten lives in one job, with other shapes and pauses, all compute right."""
    for sums in value_of(results, "lives"):
        assert len(sums) == 10
        assert all(got == wanted for got, wanted in sums)


def test_lives_that_end_as_they_begin(results, nproc):
    """A rank that leaves at once does not cut off peers that are still connecting."""
    assert value_of(results, "empty_lives") == [49] * nproc


def test_all_ranks_fail_at_once(results):
    """Who leaves with an error does not cut off a rank that still connects."""
    through, *left = value_of(results, "failing_life")
    assert all(moment > through for moment in left)


def test_lives_with_dtensor(results, nproc):
    """DTensor, which keeps meshes by their shape, does not answer with an earlier life's mesh."""
    assert value_of(results, "lives_with_dtensor") == [[True, True]] * nproc


def test_an_error_is_never_replaced(results, nproc):
    """Where telling it to the others fails, that is a note on it."""
    for error, notes, is_initialized in value_of(results, "own_store_is_lost"):
        assert error == "ValueError('bad data')"
        assert (
            "[distctx] and telling the others failed: ConnectionError: the store is gone" in notes
        )
        assert not is_initialized


def test_ranks_that_lived_differently_meet(results, nproc):
    """Ranks that had a different number of lives before still meet."""
    assert value_of(results, "uneven_lives") == [nproc * (nproc - 1) // 2] * nproc


def test_local_ranks_are_found_out(results, nproc):
    """RANK and WORLD_SIZE alone are a launch; the local rank comes from who else is on this
    host."""
    wanted = [["RuntimeStateError", rank, nproc] for rank in range(nproc)]
    assert value_of(results, "local_ranks_are_found") == wanted
