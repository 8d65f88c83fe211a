"""Ranks that are forked from a process which has imported torch, and a store that counts."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import Any

from benchmarks.common import pairs

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch.distributed", "distctx.start", "distctx.runtime"])

#: Of every group and every wait: long, since 64 ranks share few processors.
TIMEOUT = timedelta(seconds=120)


def together(barrier: Any, act: Callable[[], object]) -> float:
    """Seconds of ``act``, begun at once on all ranks."""
    barrier.wait()
    start = perf_counter()
    act()
    return perf_counter() - start


def paired(ours: Callable[[], float], theirs: Callable[[], float], number: int) -> Any:
    """``pairs`` on one rank, with this process's excepthook as before: torch puts a new one over
    the old at each init."""
    hook = sys.excepthook
    measured = pairs(ours, theirs, number)
    sys.excepthook = hook
    return measured


def over_ranks(
    told: list[Any], of: Callable[[Any], float] = max
) -> tuple[list[float], list[float]]:
    """Both sides of what each rank measured, pair by pair: ``max`` is the rank that was through
    last."""

    def side(which: int) -> list[float]:
        return [of(costs) for costs in zip(*(measured[which] for measured in told), strict=True)]

    return side(0), side(1)


def on_ranks(world_size: int, environ: dict[str, str], act: Callable[..., Any], *args: Any) -> Any:
    """What ``act(environ, *args, barrier)`` gives on each rank, each a new process."""
    barrier, answers = context.Barrier(world_size), context.SimpleQueue()
    processes = [
        context.Process(
            target=_one_rank, args=(rank, world_size, environ, act, args, barrier, answers)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    told: list[Any] = []
    while len(told) < world_size:
        if not answers.empty():
            told.append(answers.get())
        elif any(process.exitcode for process in processes):  # the others wait for it
            for process in processes:
                process.kill()
            raise RuntimeError(f"a rank of {world_size} failed; its error is above")
        else:
            time.sleep(0.01)
    for process in processes:
        process.join()
    return told


def _one_rank(
    rank: int,
    world_size: int,
    environ: dict[str, str],
    act: Callable[..., Any],
    args: tuple[Any, ...],
    barrier: Any,
    answers: Any,
) -> None:
    import torch

    torch.set_num_threads(1)
    who = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    answers.put(act(environ | who, *args, barrier))
    barrier.wait()
    os._exit(0)  # nobody's end is measured here


def free_port() -> int:
    """A port of loopback that is free just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def kept_store(environ: dict[str, str]) -> tuple[dict[str, Any], Any]:
    """Who this rank is, as torch and distctx take it, and a store of all ranks at MASTER_PORT."""
    import torch.distributed as dist

    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    store = dist.TCPStore(
        "127.0.0.1",
        int(environ["MASTER_PORT"]),
        is_master=rank == 0,
        timeout=TIMEOUT,
        wait_for_workers=False,
    )
    return {"rank": rank, "world_size": world_size, "timeout": TIMEOUT}, store


def counting_store(inner: Any) -> Any:
    """A store that hands all on to ``inner`` and counts: ``requests`` by key, ``calls`` by method,
    and ``sizes``, the bytes of the longest value by key.

    Reading waits for the key first: that makes two requests at a TCPStore's server.
    """
    import torch.distributed as dist

    class Counting(dist.Store):
        def __init__(self) -> None:
            super().__init__()
            self.requests: Counter[str] = Counter()
            self.calls: Counter[str] = Counter()
            self.sizes: Counter[str] = Counter()

        def note(self, call: str, key: str, requests: int = 1, size: int = 0) -> None:
            self.calls[call] += 1
            self.requests[key] += requests
            self.sizes[key] = max(self.sizes[key], size)

        def set(self, key: str, value: Any) -> None:
            self.note("set", key, size=len(value))
            inner.set(key, value if isinstance(value, (str, bytes)) else bytes(value))

        def get(self, key: str) -> bytes:
            self.note("get", key, requests=2)
            return bytes(inner.get(key))

        def add(self, key: str, value: int) -> int:
            self.note("add", key)
            return int(inner.add(key, value))

        def compare_set(self, key: str, expected: str, value: str) -> bytes:
            self.note("compare_set", key, size=len(value))
            return bytes(inner.compare_set(key, expected, value))

        def wait(self, keys: list[str], *timeout: timedelta) -> None:
            self.note("wait", keys[0])
            inner.wait(keys, *timeout)

        def has_extended_api(self) -> bool:
            return True

        def multi_get(self, keys: list[str]) -> list[bytes]:
            self.note("multi_get", keys[0], requests=2)
            return [bytes(value) for value in inner.multi_get(keys)]

    return Counting()
