"""Its suite, which knows distctx only by what is installed."""

from __future__ import annotations

import pytest
import statistics_of_shards
import torch

pytestmark = pytest.mark.distributed(
    [2, 4], mesh_shape=(-1, 2), mesh_dim_names=("dp", "tp"), timeout=30
)


@pytest.fixture(params=[8, 16])
def data(request):
    """Some data, the same on each rank."""
    return torch.arange(float(request.param))


def test_the_mean_is_that_of_all_the_data(distributed_runtime, data):
    """Each element counts once, whatever tensor parallelism does."""
    assert statistics_of_shards.mean(distributed_runtime, data) == data.mean()


def test_a_split_matmul_is_a_matmul(distributed_runtime):
    """The parts add up, on every rank."""
    x, weight = torch.arange(8.0).reshape(2, 4), torch.arange(12.0).reshape(4, 3)
    assert torch.equal(statistics_of_shards.matmul(distributed_runtime, x, weight), x @ weight)


def test_each_rank_has_its_own_folder(distributed_runtime, tmp_path, shared_tmp_path):
    """And one that all share."""
    (tmp_path / "mine").touch()
    (shared_tmp_path / str(distributed_runtime.rank)).touch()
    distributed_runtime.barrier()
    assert len(list(shared_tmp_path.iterdir())) == distributed_runtime.world_size
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
