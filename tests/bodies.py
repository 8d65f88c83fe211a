"""What the ranks of test_runtime_ranks.py run. Each returns something that goes into JSON."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from distctx import DistributedRuntime, _torch

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
MESH: dict[str, Any] = {"mesh_shape": (-1, 2), "mesh_dim_names": ("dp", "tp")}
BOUND: dict[str, Any] = {"timeout": 30, "rendezvous_timeout": 30}


def _sum(value: int, group: Any = None) -> int:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def _error(act: Callable[[], Any]) -> str:
    """The type of what ``act`` raised; it must raise."""
    try:
        act()
    except Exception as error:
        return type(error).__name__
    raise AssertionError("nothing was raised")


def everything() -> Any:
    """One life with a mesh: places, and a collective along every dim."""
    with DistributedRuntime(**MESH, **BOUND) as rt:
        before = _torch.number_of_groups()
        told = {
            "rank": rt.rank,
            "local_rank": rt.local_rank,
            "launcher": rt.environment.launcher,
            "backend": rt.backend,
            "device": str(rt.device),
            "coordinate": rt.coordinate,
            "dp_partition": rt.dp_partition,
            "tp_size": rt.tp_size,
            "groups_before_the_mesh": before,
            "sums": {name: _sum(rt.rank, rt.group(name)) for name in ("dp", "tp")},
            "ranks": {name: rt.ranks(name) for name in ("dp", "tp")},
            "order": [list(dist.get_process_group_ranks(rt.group(n))) for n in ("dp", "tp")],
            "same": rt.submesh("tp") is rt.submesh(1) and rt.group("dp") is rt.group(0),
            "equal": rt.mesh
            == init_device_mesh("cpu", rt.layout.shape, mesh_dim_names=("dp", "tp")),
            "timeout": _torch.group_timeout(rt.group("tp")).total_seconds(),
        }
        rt.barrier()
    return told | {"groups_after": _torch.number_of_groups()}


def lives() -> Any:
    """Ten lives with changing shapes, pauses, and a mesh in some."""
    sums = []
    chance = random.Random(RANK)
    for life in range(10):
        shape = (-1,) if life % 3 == 0 else (1, -1) if life % 3 == 1 else (-1, 2)
        with DistributedRuntime(mesh_shape=shape, **BOUND) as rt:
            time.sleep(chance.random() / 50)
            group = rt.group(rt.layout.ndim - 1) if life % 2 else None
            sums.append([_sum(rt.rank, group), sum(rt.ranks(-1) if life % 2 else rt.ranks())])
    return sums


def empty_lives() -> Any:
    """Fifty lives that end as soon as they begin, some with a mesh."""
    for life in range(50):
        with DistributedRuntime(mesh_shape=(-1, 2) if life % 2 else None, **BOUND) as rt:
            if life % 4 == 1:
                _ = rt.mesh
    return life


def failing_life() -> Any:
    """A life that fails as soon as it begins, while rank 0 still connects. Tells when rank 0 was
    through, and when the others had left."""
    init = dist.init_process_group

    def slow_init(**arguments: Any) -> None:
        init(**arguments)
        time.sleep(0.5)

    if RANK == 0:
        dist.init_process_group = slow_init
    try:
        rt = DistributedRuntime(**BOUND).open()
    finally:
        dist.init_process_group = init
    if RANK == 0:
        through = time.monotonic()
        rt.close(abort=True)
        return through
    rt.close(abort=True)
    return time.monotonic()


def lives_with_dtensor() -> Any:
    """Three lives of one shape compute the same with DTensor: none meets the mesh of another."""
    told = []
    for _ in range(3):
        with DistributedRuntime(**MESH, **BOUND) as rt:
            torch.manual_seed(0)
            model = torch.nn.Linear(8, 12)
            parallelize_module(model, rt.submesh("tp"), ColwiseParallel(output_layouts=Replicate()))
            total = model(torch.ones(4, 8)).sum()
            total.backward()
            told.append(total.item())
    return [
        torch.equal(torch.tensor(told), torch.tensor(told[:1] * 3)),
        isinstance(model.weight, DTensor),
    ]


class LostStore(dist.Store):
    """A user's own store in Python, which hands all on to another until it is lost."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.is_lost = inner, False

    def _here(self) -> Any:
        if self.is_lost:
            raise ConnectionError("the store is gone")
        return self.inner

    def set(self, key: str, value: Any) -> None:
        """As torch's."""
        self._here().set(key, value if isinstance(value, (str, bytes)) else bytes(value))

    def get(self, key: str) -> bytes:
        """As torch's."""
        return bytes(self._here().get(key))

    def add(self, key: str, value: int) -> int:
        """As torch's."""
        return int(self._here().add(key, value))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """As torch's."""
        return bytes(self._here().compare_set(key, expected, value))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """As torch's."""
        self._here().wait(keys, *timeout)


def own_store_is_lost() -> Any:
    """An error leaves the block as it is, also where it cannot be told to the others."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = LostStore(dist.PrefixStore("own", dist.TCPStore(host, port, is_master=False)))
    try:
        with DistributedRuntime(store=store, rank=RANK, world_size=WORLD_SIZE, **BOUND) as rt:
            rt.barrier()
            store.is_lost = True
            raise ValueError("bad data")
    except Exception as error:
        notes = [note.partition(" (")[0] for note in error.__notes__[1:]]
        return [repr(error), notes, dist.is_initialized()]


def uneven_lives() -> Any:
    """Ranks that lived a different number of worlds of their own before still meet."""
    for _ in range(RANK):
        with DistributedRuntime(rank=0, world_size=1, store=dist.HashStore()):
            pass
    with DistributedRuntime(**BOUND) as rt:
        return _sum(rt.rank)


def local_ranks_are_found() -> Any:
    """Without LOCAL_RANK the ranks find out who else is on this host."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("LOCAL_")}
    try:
        rt = DistributedRuntime(**BOUND)
        before = _error(lambda: rt.local_rank)
        with rt:
            return [before, rt.local_rank, rt.environment.local_world_size]
    finally:
        os.environ.update(kept)
