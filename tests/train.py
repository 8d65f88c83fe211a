"""Train a small model on a runtime's mesh, and hold it against one process that reads all the data.

By hand, with the dims that say what is wanted (``--help`` lists how):

    torchrun --nproc-per-node 8 tests/train.py --mesh dp_replicate=2,dp_shard=2,tp=2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distctx import DistributedRuntime

STEPS, BATCH, WIDTH, HIDDEN = 4, 24, 6, 8

#: One of the model's two blocks, as tensor parallelism divides it.
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    """A residual block, whose activations can be computed twice."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.recompute = recompute

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes ``(rows, WIDTH)`` in and out."""
        if self.recompute:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)


class Run(NamedTuple):
    """What a training run leaves: the loss of each step, and each parameter's last gradient."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]

    def differs_from(self, other: Run) -> list[str]:
        """The names of what is not the same within rounding."""
        if self.gradients.keys() != other.gradients.keys():
            return [f"gradients of {sorted(self.gradients)}, not of {sorted(other.gradients)}"]
        wrong = [
            f"loss of step {step}: {mine:.8f}, not {theirs:.8f}"
            for step, (mine, theirs) in enumerate(zip(self.losses, other.losses, strict=True))
            if not abs(mine - theirs) <= 1e-10  # nor is it the same where one is no number
        ]
        return wrong + [
            f"gradient of {name}: off by {(mine - other.gradients[name]).abs().max():.2g}"
            for name, mine in self.gradients.items()
            if not torch.allclose(mine, other.gradients[name], rtol=1e-9, atol=1e-12)
        ]


def make_model(recompute: bool = False) -> nn.Module:
    """The same weights on every rank, in float64, so that only a real difference shows."""
    torch.manual_seed(7)
    return nn.Sequential(Block(recompute), Block(recompute)).double()


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that all ranks together read in a step; each row matters differently."""
    chance = torch.Generator().manual_seed(step)
    rows = torch.randn(BATCH, WIDTH, generator=chance, dtype=torch.float64)
    return rows, torch.sin(3 * rows.cumsum(0))


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in one piece, wherever its pieces are. Talks to the other ranks."""
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


def train(
    model: nn.Module,
    share: tuple[int, int] = (1, 0),
    average: Callable[[torch.Tensor], Any] = lambda loss: None,
) -> Run:
    """Train on one share of each step's rows; ``average`` makes the loss that of all shares."""
    parts, index = share
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        # Contiguous, since torch 2.13 cannot compile tensor parallelism on a strided input.
        rows, wanted = (tensor[index::parts].contiguous() for tensor in make_batch(step))
        optimizer.zero_grad()
        loss = (model(rows) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        told = loss.detach().clone()
        average(told)
        losses.append(told.item())
    gradients = {
        name.replace("module.", "").replace("_orig_mod.", ""): whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Run(losses, gradients)


def alone() -> Run:
    """One process that reads everything."""
    return train(make_model())


def tensor_parallel(model: nn.Module, mesh: Any) -> None:
    """Divide each block's tensors along a 1-D mesh."""
    for block in model.children():
        parallelize_module(block, mesh, PLAN)


def shard(model: nn.Module, mesh: Any) -> None:
    """FSDP2 on each block, then on what is left."""
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def average_over(rt: DistributedRuntime, *dims: str) -> Callable[[torch.Tensor], Any]:
    """Make a loss the mean over all ranks along these dims."""

    def average(loss: torch.Tensor) -> None:
        dist.all_reduce(loss, group=rt.group(*dims))
        loss /= rt.size(*dims)

    return average


def spread(
    rt: DistributedRuntime,
    how: str = "fsdp",
    recompute: bool = False,
    compile_with: str | None = None,
) -> Run:
    """Train on a runtime's mesh: its tp dim divides tensors, its data-parallel dims the rows, with
    DDP where ``how`` says so, else FSDP2 (HSDP where there are dp_replicate and dp_shard)."""
    model = make_model(recompute)
    names = rt.layout.dim_names or ()
    data = [name for name in names if name in ("dp", "dp_replicate", "dp_shard")]
    if "tp" in names:
        tensor_parallel(model, rt.submesh("tp"))
    if how == "ddp":
        model = DistributedDataParallel(model, process_group=rt.group(*data))
    elif data:
        shard(model, rt.submesh(*data))
    if compile_with:
        model = torch.compile(model, backend=compile_with)
    average = average_over(rt, *data) if data else lambda loss: None
    return train(model, rt.dp_partition, average)


def main() -> None:
    """Train on the ranks of a launch, compare, and say so on the main rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=-1", help="dp, dp_replicate, dp_shard and tp")
    parser.add_argument("--how", default="fsdp", choices=["fsdp", "ddp"])
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--compile-with", help="a torch.compile backend: aot_eager, inductor")
    asked = parser.parse_args()
    dims = dict(part.split("=") for part in asked.mesh.split(","))
    shape = tuple(int(size) for size in dims.values())
    with DistributedRuntime("gloo", mesh_shape=shape, mesh_dim_names=tuple(dims)) as rt:
        run = spread(rt, asked.how, asked.recompute, asked.compile_with)
        wrong = run.differs_from(alone())
        if rt.is_main_process:
            if asked.compile_with:
                print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
            print("losses", " ".join(f"{loss:.6f}" for loss in run.losses))
            print("\n".join(wrong) or "equal to one process")
        if wrong:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
