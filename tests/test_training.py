"""Training on a runtime's mesh gives what one process gives, and a wrong mesh does not.

``detail=False``: with TORCH_DISTRIBUTED_DEBUG=DETAIL torch 2.13 crashes where DDP is made over a
gloo group, with distctx and without.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from launch import HERE, run, torchrun
from train import (
    HIDDEN,
    WIDTH,
    Run,
    alone,
    average_over,
    make_model,
    shard,
    spread,
    tensor_parallel,
    train,
)

#: torch 2.8 refuses to divide tensors along any but the last dim, and what it puts around a group
#: to look into its collectives cannot gather a DTensor.
OLD = torch.__version__.startswith("2.8.")
DETAIL = not OLD


def differences(run: Run) -> list[str]:
    """Where a run is not that of one process."""
    return run.differs_from(alone())


@pytest.mark.distributed(mesh_shape=(4,), mesh_dim_names=("dp",), detail=False)
def test_ddp(distributed_runtime):
    """DDP over the dp group gives the gradients and the losses of one process."""
    assert differences(spread(distributed_runtime, "ddp")) == []


@pytest.mark.distributed(mesh_shape=(2, 2), mesh_dim_names=("dp", "cp"), detail=False)
def test_ddp_beside_another_dim(distributed_runtime):
    """DDP over the dp group of a 2-D mesh does, where the other dim's ranks read the same."""
    assert differences(spread(distributed_runtime, "ddp")) == []


@pytest.mark.distributed(mesh_shape=(4,), mesh_dim_names=("dp",), detail=DETAIL)
def test_fsdp(distributed_runtime):
    """FSDP2 over the dp sub-mesh does."""
    assert differences(spread(distributed_runtime)) == []


@pytest.mark.distributed(
    mesh_shape=(2, 2), mesh_dim_names=("dp_replicate", "dp_shard"), detail=DETAIL
)
def test_hsdp(distributed_runtime):
    """HSDP over the sub-mesh of two dims does."""
    assert differences(spread(distributed_runtime)) == []


@pytest.mark.distributed(mesh_shape=(4,), mesh_dim_names=("tp",), detail=DETAIL)
def test_tensor_parallel(distributed_runtime):
    """Tensor parallelism over the tp sub-mesh does, with all the data on every rank, and its
    weights are divided along it."""
    model = make_model()
    tensor_parallel(model, distributed_runtime.submesh("tp"))
    weights = [block.up.weight for block in model.children()]
    assert [weight.placements for weight in weights] == [(Shard(0),)] * 2
    assert [tuple(weight.to_local().shape) for weight in weights] == [(HIDDEN // 4, WIDTH)] * 2
    assert differences(spread(distributed_runtime)) == []


@pytest.mark.distributed(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"), detail=DETAIL)
def test_fsdp_and_tensor_parallel(distributed_runtime):
    """FSDP2 × TP on one mesh does."""
    assert differences(spread(distributed_runtime)) == []


@pytest.mark.distributed(
    mesh_shape=(2, 2, 2),
    mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
    timeout=90,
    detail=DETAIL,
)
def test_hsdp_and_tensor_parallel(distributed_runtime):
    """HSDP × TP on 8 ranks does."""
    assert differences(spread(distributed_runtime)) == []


@pytest.mark.distributed(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"), detail=DETAIL)
def test_activation_checkpointing(distributed_runtime):
    """FSDP2 × TP with every block computed twice does."""
    assert differences(spread(distributed_runtime, recompute=True)) == []


def test_compiled():
    """FSDP2 × TP with graphs captured by torch.compile and every block computed twice does, as a
    program under torchrun."""
    mesh = ("--mesh", "dp=2,tp=2", "--recompute", "--compile-with", "aot_eager")
    done = run(*torchrun(str(HERE / "train.py"), *mesh, nproc=4), timeout=100)
    assert done.returncode == 0, done.stderr
    assert "equal to one process" in done.stdout, done.stderr
    graphs = re.search(r"^graphs (\d+)$", done.stdout, re.MULTILINE)
    assert graphs, done.stdout
    assert int(graphs[1]) > 0


@pytest.mark.distributed(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"), detail=False)
@pytest.mark.parametrize("wrong", ["group", "dims", "partition"])
def test_what_is_wrong_shows(distributed_runtime, wrong):
    """DDP over the tp group, tensors divided along dp, and rows divided along tp all give something
    else than one process."""
    rt: Any = distributed_runtime
    model, share = make_model(), rt.dp_partition
    if wrong == "group":
        model = DistributedDataParallel(model, process_group=rt.group("tp"))
    elif wrong == "dims":
        if OLD:
            with pytest.raises(RuntimeError, match="Found TP device_mesh on the 0 dimension"):
                tensor_parallel(model, rt.submesh("dp"))
            return
        tensor_parallel(model, rt.submesh("dp"))
        shard(model, rt.submesh("tp"))
    else:
        tensor_parallel(model, rt.submesh("tp"))
        shard(model, rt.submesh("dp"))
        share = (rt.size("tp"), rt.index("tp"))
    found = differences(train(model, share, average_over(rt, "dp")))
    assert any(text.startswith("gradient") for text in found)
    assert any(text.startswith("loss") for text in found)
