"""What a project of somebody else might hold: statistics of data that ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from distctx import DistributedRuntime


def mean(rt: DistributedRuntime, data: torch.Tensor) -> float:
    """The mean of all the data, each rank of a data-parallel group reading its share."""
    sampler = DistributedSampler(data, shuffle=False, **rt.dp_partition.sampler_kwargs)
    mine = data[list(sampler)]
    total = torch.tensor([mine.sum().item(), float(len(mine))])
    dist.all_reduce(total, group=rt.group("dp"))
    return (total[0] / total[1]).item()


def matmul(rt: DistributedRuntime, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight``, whose inner dim is split among the tensor-parallel ranks."""
    rows = weight.shape[0] // rt.tp_size
    here = slice(rt.index("tp") * rows, (rt.index("tp") + 1) * rows)
    y = x[:, here] @ weight[here]
    dist.all_reduce(y, group=rt.group("tp"))
    return y
