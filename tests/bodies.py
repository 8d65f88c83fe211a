"""What the ranks of test_runtime_ranks.py run. Each returns something that goes into JSON."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distctx import DistributedRuntime, RemoteRankError, _torch, progress

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
MESH: dict[str, Any] = {"mesh_shape": (-1, 2), "mesh_dim_names": ("dp", "tp")}
_worlds = 0
BOUND: dict[str, Any] = {"timeout": 30, "rendezvous_timeout": 30}


def _sum(value: int, group: Any = None) -> int:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def _error(act: Callable[[], Any]) -> dict[str, Any]:
    """What ``act`` raised, and after how long; it must raise."""
    start = time.monotonic()
    try:
        act()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "missing": list(getattr(error, "missing_ranks", ())),
            "values": {str(k): dict(v) for k, v in getattr(error, "values", {}).items()},
            "seconds": time.monotonic() - start,
        }
    raise AssertionError("nothing was raised")


def _start_with_torch() -> None:
    """A world that torch makes, under fresh keys: old ones would be met again."""
    global _worlds
    _worlds += 1
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    fresh = dist.PrefixStore(f"torch's world {_worlds}", store)
    dist.init_process_group("gloo", store=fresh, rank=RANK, world_size=WORLD_SIZE)


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


def spanning() -> Any:
    """Three dims: a sub-mesh of two for HSDP, and the one group that spans two."""
    names = ("dp_replicate", "dp_shard", "tp")
    with DistributedRuntime(mesh_shape=(-1, 2, 1), mesh_dim_names=names, **BOUND) as rt:
        group = rt.group("dp_replicate", "tp")
        return {
            "hsdp": list(rt.submesh("dp_replicate", "dp_shard").shape),
            "sum": _sum(rt.rank, group),
            "ranks": rt.ranks("dp_replicate", "tp"),
            "partition": rt.dp_partition,
            "same": group is rt.group("dp_replicate", "tp"),
        }


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


def uneven_lives() -> Any:
    """Ranks that lived a different number of worlds of their own before still meet."""
    for _ in range(RANK):
        with DistributedRuntime(rank=0, world_size=1, store=dist.HashStore()):
            pass
    with DistributedRuntime(**BOUND) as rt:
        return _sum(rt.rank)


def disagree_on_the_shape() -> Any:
    """The last rank asks for another shape; then all agree."""
    shape = (-1, 2) if RANK < WORLD_SIZE - 1 else (-1, 1)
    names = ("dp", "tp")
    rt = DistributedRuntime(mesh_shape=shape, mesh_dim_names=names, **BOUND)
    told = _error(rt.open)
    with DistributedRuntime(**BOUND) as rt:
        return told | {"then": _sum(rt.rank)}


def disagree_on_the_backend() -> Any:
    """Rank 0 asks for another backend."""
    backend = "gloo" if RANK else "cpu:gloo"
    return _error(DistributedRuntime(backend, **BOUND).open)


def a_rank_is_absent() -> Any:
    """The last rank comes late; the others have given up, and it never starts alone."""
    seconds = 1.0
    if RANK == WORLD_SIZE - 1:
        time.sleep(1.5 * seconds)
    told = _error(DistributedRuntime(timeout=30, rendezvous_timeout=seconds).open)
    time.sleep(2 * seconds)
    with DistributedRuntime(**BOUND) as rt:
        return told | {"then": _sum(rt.rank)}


def rank_zero_is_absent() -> Any:
    """Rank 0 comes when the others have given up."""
    if RANK == 0:
        time.sleep(1.5)
        told: dict[str, Any] = {}
    else:
        told = _error(DistributedRuntime(timeout=30, rendezvous_timeout=1.0).open)
    with DistributedRuntime(**BOUND) as rt:
        return told | {"then": _sum(rt.rank)}


def touched_by_some() -> Any:
    """The mesh is first touched by all ranks but the last; later by all."""
    with DistributedRuntime(**MESH, timeout=30, rendezvous_timeout=1.0) as rt:
        told: dict[str, Any] = {}
        if RANK < WORLD_SIZE - 1:
            told = _error(lambda: rt.mesh)
        dist.barrier()
        return told | {"then": _sum(rt.rank, rt.group("tp")), "ranks": rt.ranks("tp")}


def touched_for_different_things() -> Any:
    """Rank 0 touches another mesh than the others, at the same time."""
    with DistributedRuntime(**MESH, **BOUND) as rt:
        with DistributedRuntime(mesh_shape=(-1,), mesh_dim_names=("x",)) as inner:
            told = _error(lambda: rt.mesh if RANK else inner.submesh("x"))
        return told | {"then": _sum(rt.rank, rt.group("tp")), "ranks": rt.ranks("tp")}


def joined() -> Any:
    """A group that torch made is joined; its ranks meet in its own store for the mesh."""
    hook = sys.excepthook
    _start_with_torch()
    with DistributedRuntime(**MESH, **BOUND) as rt:
        told = {"owns": rt.owns_process_group, "sum": _sum(rt.rank, rt.group("tp"))}
        told["inside"] = _torch.number_of_groups()
    told |= {"after": _torch.number_of_groups(), "still": _sum(1)}
    dist.destroy_process_group()
    sys.excepthook = hook
    return told


def first() -> Any:
    """The main rank goes first, by more than the group's timeout; then it fails there."""
    with DistributedRuntime(timeout=1.0, rendezvous_timeout=30) as rt:
        start = time.monotonic()
        with rt.main_first():
            waited = time.monotonic() - start
            if rt.is_main_process:
                time.sleep(1.5)
        with rt.main_first(local=True):
            pass

        def fail() -> None:
            with rt.main_first():
                if rt.is_main_process:
                    raise KeyError("no such file")

        told = _error(fail)
        return {"waited": waited, "error": told}


def first_in_a_joined_group() -> Any:
    """In each of two joined lives the main rank goes first, whatever failed in the first."""
    hook, told = sys.excepthook, []
    _start_with_torch()
    for life in range(2):
        dist.barrier()
        with DistributedRuntime(**BOUND) as rt:
            start = time.monotonic()
            with rt.main_first():
                told.append(time.monotonic() - start)
                if rt.is_main_process:
                    time.sleep(0.5)
            if life == 0:
                with contextlib.suppress(KeyError, RemoteRankError), rt.main_first(local=True):
                    raise KeyError
    dist.destroy_process_group()
    sys.excepthook = hook
    return told


def barrier_names_the_absent() -> Any:
    """The last rank does not come to the barrier."""
    with DistributedRuntime(timeout=1.0, rendezvous_timeout=30) as rt:
        told = _error(rt.barrier) if RANK < WORLD_SIZE - 1 else {}
        time.sleep(0.0 if told else 2.0)
        return told


def local_ranks_are_found() -> Any:
    """Without LOCAL_RANK the ranks find out who else is on this host."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("LOCAL_")}
    try:
        rt = DistributedRuntime(**BOUND)
        before = _error(lambda: rt.local_rank)["type"]
        with rt:
            return [before, rt.local_rank, rt.environment.local_world_size]
    finally:
        os.environ.update(kept)


def a_rank_taken_twice() -> Any:
    """The last process says that it is the rank before it."""
    rank = WORLD_SIZE - 2 if RANK == WORLD_SIZE - 1 else RANK
    arguments: dict[str, Any] = {"rank": rank, "world_size": WORLD_SIZE}
    told = _error(DistributedRuntime(timeout=5, **arguments).open)
    time.sleep(1.0)
    with DistributedRuntime(**BOUND) as rt:
        return told | {"pid": os.getpid(), "then": _sum(rt.rank)}


def progress_is_logged() -> Any:
    """The main rank says for whom it waits."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep()
    logging.getLogger("distctx").addHandler(handler)
    progress._REPORT_AFTER = 0.2
    if RANK:
        time.sleep(1.0)
    with DistributedRuntime(**BOUND):
        pass
    logging.getLogger("distctx").removeHandler(handler)
    return lines
