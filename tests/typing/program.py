"""A user's program, which mypy --strict must accept as it stands, and whose types it must know."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import assert_type

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distctx import (
    DistributedRuntime,
    LaunchEnvironment,
    MeshLayout,
    Partition,
    RendezvousTimeoutError,
)


def train(rt: DistributedRuntime, model: nn.Module) -> int:
    """Use what an open runtime has."""
    assert_type(rt.rank, int)
    assert_type(rt.tp_size, int)
    assert_type(rt.device, torch.device)
    assert_type(rt.dp_partition, Partition)
    assert_type(rt.dp_partition.sampler_kwargs, dict[str, int])
    assert_type(rt.coordinate, tuple[int, ...])
    assert_type(rt.layout, MeshLayout)
    assert_type(rt.environment, LaunchEnvironment)
    assert_type(rt.submesh("dp", "tp"), DeviceMesh)
    assert_type(rt.group("dp"), ProcessGroup)
    parts, index = rt.dp_partition
    assert_type(parts, int)
    model.to(rt.device)
    with rt.main_first(local=True):
        pass
    rt.barrier()
    return index


def main() -> int:
    """Open one, and read the ranks that did not come from the error."""
    try:
        with DistributedRuntime(
            mesh_shape=(-1, 2), mesh_dim_names=("dp", "tp"), timeout=timedelta(minutes=5)
        ) as rt:
            assert_type(rt, DistributedRuntime)
            return train(rt, nn.Linear(2, 2))
    except RendezvousTimeoutError as error:
        print("absent:", *error.missing_ranks, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
