"""A simulated rank: the same class on torch's fake backend, in one process."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distctx import (
    DistributedRuntime,
    GroupConflictError,
    LaunchEnvironmentError,
    LayoutError,
)

NAMES = ("dp", "tp")


def test_it_answers_as_that_rank_of_that_world():
    """Place, mesh, sub-mesh and groups are that rank's, opened or not."""
    rt = DistributedRuntime.simulate(1234, 4096, mesh_shape=(-1, 8), mesh_dim_names=NAMES)
    assert type(rt) is DistributedRuntime
    assert rt.is_simulated
    assert (rt.coordinate, rt.dp_partition, rt.tp_size) == ((154, 2), (512, 154), 8)
    with rt:
        assert tuple(rt.mesh.get_coordinate()) == (154, 2)
        assert dist.get_process_group_ranks(rt.group("tp")) == list(range(1232, 1240))
        assert rt.submesh("dp").mesh.tolist() == list(range(2, 4096, 8))
        assert ", simulated, " in repr(rt)
    assert "collectives compute nothing" in str(rt.describe())
    assert "compute nothing" in DistributedRuntime.simulate.__doc__


def test_it_needs_no_launch_and_heeds_none(monkeypatch):
    """What the launcher says of this process does not matter."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with DistributedRuntime.simulate(5, 8) as rt:
        assert (rt.rank, rt.world_size) == (5, 8)
        rt.barrier()


def test_tensor_parallel_and_fsdp_run_as_on_that_rank():
    """parallelize_module and fully_shard shard a model as for that rank, and a step runs."""
    with DistributedRuntime.simulate(6, 8, mesh_shape=(4, 2), mesh_dim_names=NAMES) as rt:
        layers = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), torch.nn.ReLU()
        model = torch.nn.Sequential(*layers)
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, rt.submesh("tp"), plan)
        fully_shard(model, mesh=rt.submesh("dp"))
        weight = model[0].weight
        assert weight.shape == (16, 8)
        assert weight.to_local().shape == (2, 8)  # 16 rows over tp=2 and dp=4
        model(torch.ones(3, 8)).sum().backward()
        assert weight.grad.to_local().shape == (2, 8)


def test_a_world_of_65536_opens():
    """A large world opens, with its mesh, in this one process."""
    with DistributedRuntime.simulate(
        54321, 65536, mesh_shape=(-1, 32, 8), mesh_dim_names=("pp", "dp", "tp")
    ) as rt:
        assert tuple(rt.mesh.get_coordinate()) == (212, 6, 1)
        assert rt.group("pp").size() == 256


def test_a_real_world_is_not_joined():
    """A simulated runtime refuses to join a real group."""
    with (
        DistributedRuntime(),
        pytest.raises(GroupConflictError, match="backend: got 'gloo', wanted 'fake'"),
    ):
        DistributedRuntime.simulate(0, 1).open()


@pytest.mark.parametrize("arguments", [{}, {"backend": "gloo"}, {"backend": "cpu:gloo"}])
def test_no_real_runtime_joins_it(arguments):
    """A real runtime refuses to join a simulated world; another simulation of it may."""
    with DistributedRuntime.simulate(0, 2):
        with pytest.raises(GroupConflictError, match="got 'fake'"):
            DistributedRuntime(**arguments).open()
        with DistributedRuntime.simulate(0, 2) as same:
            assert not same.owns_process_group


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"backend": "gloo"}, "takes no backend="),
        ({"init_method": "tcp://here:1"}, "takes no init_method="),
        ({"store": 1}, "takes no store="),
        ({"rank": 9}, "9"),
    ],
)
def test_what_makes_no_simulation_is_refused_at_once(arguments, says):
    """Where to meet, a real backend, a rank outside: refused before anything is opened."""
    with pytest.raises(LaunchEnvironmentError, match=re.escape(says)):
        DistributedRuntime.simulate(**{"rank": 0, "world_size": 8} | arguments)


def test_a_mesh_that_does_not_fit_is_refused_at_once():
    """A mesh that the world has not the ranks for is an error of simulate() itself."""
    with pytest.raises(LayoutError, match="needs a world size that 3 divides"):
        DistributedRuntime.simulate(0, 8, mesh_shape=(-1, 3))
