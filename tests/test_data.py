"""Every sample is read exactly once, by samplers and in data-loading workers."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from distctx import MeshLayout, Partition

SAMPLES = range(24)
DATA_DIMS = ("dp", "dp_replicate", "dp_shard")
MESHES = [("pp", "dp", "tp"), ("dp", "cp", "tp"), ("dp_replicate", "dp_shard", "tp")]

each_mesh = pytest.mark.parametrize("names", MESHES, ids="-".join)


class Split(IterableDataset):
    """The samples of one partition, split once more among the workers that read it."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Each sample with the worker and the process that read it."""
        parts, index = self.partition
        worker = get_worker_info()
        parts, index = parts * worker.num_workers, index * worker.num_workers + worker.id
        return ((sample, worker.id, os.getpid()) for sample in SAMPLES[index::parts])


def gather(mine: Any) -> list[Any]:
    """What every rank has, in the order of ranks."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def check_each_sample_once(layout: MeshLayout, read: Sequence[Sequence[int]]) -> None:
    """Ranks that differ in no data dim read the same; all others together read each sample once."""
    shares: dict[tuple[int, ...], list[list[int]]] = {}
    for rank, samples in enumerate(read):
        place = dict(zip(layout.dim_names, layout.coordinate(rank), strict=True))
        data_place = tuple(index for name, index in place.items() if name in DATA_DIMS)
        shares.setdefault(data_place, []).append(list(samples))
    for place, peers in shares.items():
        assert all(peer == peers[0] for peer in peers), f"peers at {place} read {peers}"
    assert sorted(sample for peers in shares.values() for sample in peers[0]) == list(SAMPLES)


@pytest.mark.distributed(8)
@each_mesh
def test_sampler_reads_each_sample_once(make_distributed_runtime, names):
    """DistributedSampler, given a partition, reads each sample once over all data dims."""
    with make_distributed_runtime(mesh_shape=(2, 2, 2), mesh_dim_names=names) as rt:
        sampler = DistributedSampler(SAMPLES, **rt.dp_partition.sampler_kwargs, shuffle=False)
        mine = [batch.item() for batch in DataLoader(SAMPLES, batch_size=1, sampler=sampler)]
        partitions = 4 if "dp_replicate" in names else 2
        assert rt.dp_partition.num_partitions == partitions
        assert len(mine) == len(SAMPLES) // partitions
        check_each_sample_once(rt.layout, gather(mine))


@pytest.mark.distributed(8)
@each_mesh
def test_a_wrong_partition_does_not_pass(make_distributed_runtime, names):
    """Split along tp, which is wrong, tensor-parallel peers read different samples, and the check
    says so."""
    with make_distributed_runtime(
        mesh_shape=(2, 2, 2), mesh_dim_names=names, dp_mesh_dim="tp"
    ) as rt:
        sampler = DistributedSampler(SAMPLES, **rt.dp_partition.sampler_kwargs, shuffle=False)
        read = gather(list(sampler))
        with pytest.raises(AssertionError, match="peers at"):
            check_each_sample_once(rt.layout, read)


def method_on(dp: int, tp: int, method: str) -> Any:
    """A start method, tried on few ranks: a spawned worker takes seconds to import torch."""
    mesh = {"mesh_shape": (dp, tp), "mesh_dim_names": ("dp", "tp")}
    return pytest.param(method, marks=pytest.mark.distributed(dp * tp, **mesh))


@pytest.mark.parametrize(
    "method",
    [
        method_on(2, 2, "fork"),
        method_on(1, 2, "forkserver"),
        method_on(2, 1, "forkserver"),
        method_on(1, 2, "spawn"),
        method_on(2, 1, "spawn"),
    ],
)
def test_workers_read_each_sample_once(distributed_runtime, method):
    """A partition passed to data-loading workers, however they start, is split once more there."""
    rt = distributed_runtime
    if method == "forkserver":
        multiprocessing.get_context(method).set_forkserver_preload(["torch.utils.data"])
    loader = DataLoader(
        Split(rt.dp_partition), batch_size=None, num_workers=2, multiprocessing_context=method
    )
    read = list(loader)
    assert {worker for _, worker, _ in read} == {0, 1}
    pids = {pid for _, _, pid in read}
    assert len(pids) == 2
    assert os.getpid() not in pids
    check_each_sample_once(rt.layout, gather([sample for sample, _, _ in read]))
