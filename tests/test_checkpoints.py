"""A checkpoint that one world saves is loaded by worlds of other sizes and shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distctx import DistributedRuntime

NAMES = ("dp", "tp")
FULL = StateDictOptions(full_state_dict=True)
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


class Training:
    """A model with values that follow from a seed, and its optimizer; sharded, in a runtime."""

    def __init__(self, seed: int, rt: DistributedRuntime | None = None) -> None:
        torch.manual_seed(seed)
        # With a linear layer last, fully_shard of torch 2.13 warns that it gives out a view.
        self.model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6), nn.Tanh())
        if rt is not None:
            parallelize_module(self.model, rt.submesh("tp"), PLAN)
            fully_shard(self.model, mesh=rt.submesh("dp"))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        """One step, which gives the optimizer its state."""
        self.forward().square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward(self) -> torch.Tensor:
        """What the model makes of an input that is always the same."""
        return self.model(torch.linspace(-1, 1, 32).reshape(4, 8))

    def state(self, options: StateDictOptions | None = None) -> dict[str, Any]:
        """What a checkpoint holds."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def load(self, place: str) -> None:
        """Take everything from a checkpoint."""
        state = self.state()
        dcp.load(state, checkpoint_id=place)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.8's own use of it
# DETAIL's wrapper around gloo lacks a collective in torch 2.8, allgather_into_tensor_coalesced.
@pytest.mark.distributed(4, detail=False)
def test_a_checkpoint_outlives_its_world(make_distributed_runtime, shared_tmp_path):
    """What 2×2 ranks save, 2×1, 1×2 and 1×1 ranks load: the parameters, the optimizer's state and
    what the model computes."""
    place = str(shared_tmp_path / "checkpoint")
    with make_distributed_runtime(mesh_shape=(2, 2), mesh_dim_names=NAMES) as rt:
        rank = rt.rank
        training, plain = Training(1, rt), Training(1)
        for one in (training, plain):
            one.step()
        saved, output = training.state(FULL), training.forward().detach()
        torch.testing.assert_close(saved["model"], dict(plain.model.state_dict()))
        dcp.save(training.state(), checkpoint_id=place)
    for shape in [(2, 1), (1, 2), (1, 1)]:
        world_size = shape[0] * shape[1]
        if rank >= world_size:
            break
        with make_distributed_runtime(
            init_method=f"file://{shared_tmp_path}/store-{shape}",
            rank=rank,
            world_size=world_size,
            mesh_shape=shape,
            mesh_dim_names=NAMES,
        ) as rt:
            training = Training(2, rt)
            assert not torch.allclose(training.forward(), output)
            training.load(place)
            loaded = training.state(FULL)
            assert loaded["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
            torch.testing.assert_close(loaded["model"], saved["model"], rtol=0, atol=0)
            moments = (state["optimizer"]["state"] for state in (loaded, saved))
            torch.testing.assert_close(*moments, rtol=0, atol=0)
            torch.testing.assert_close(training.forward().detach(), output)
