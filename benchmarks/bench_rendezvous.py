"""Meeting and init against torch's bare init, and what each asks of the store.

The ranks are forked from a process that has imported torch, and begin at once; a time is that of
the rank which is through last. Three starts: a job's first, where rank 0 serves the store; the
first where a launcher serves it; and a later one, in a store that is open already on both sides.
"""

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

from benchmarks.common import Ratio, pairs, report

#: How many ranks, and how many pairs of first starts and of later ones.
RANKS = {2: (9, 41), 4: (15, 81), 8: (9, 31), 16: (5, 15), 32: (3, 9), 64: (3, 5)}
TIMEOUT = timedelta(seconds=120)

context = multiprocessing.get_context("forkserver")


def together(barrier: Any, act: Callable[[], object]) -> float:
    """Seconds of ``act``, begun at once on all ranks."""
    barrier.wait()
    start = perf_counter()
    act()
    return perf_counter() - start


def first_start(environ: dict[str, str], ours: bool, barrier: Any) -> Any:
    """One rank's first start, as a script does it under these variables."""
    import torch.distributed as dist

    from distctx import DistributedRuntime

    os.environ |= environ
    if ours:
        return together(barrier, DistributedRuntime("gloo", timeout=TIMEOUT).open)
    return together(barrier, lambda: dist.init_process_group("gloo", timeout=TIMEOUT))


def later_starts(environ: dict[str, str], number: int, barrier: Any) -> Any:
    """One rank's later starts, pair by pair, and the requests of one of them."""
    import torch.distributed as dist

    from distctx import DistributedRuntime

    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    port = int(environ["MASTER_PORT"])
    who: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": TIMEOUT}
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=rank == 0, timeout=TIMEOUT, wait_for_workers=False
    )
    lives = iter(range(10**9))

    def ours() -> float:
        runtime = DistributedRuntime("gloo", store=store, **who)
        took = together(barrier, runtime.open)
        barrier.wait()
        runtime.close()
        return took

    def theirs() -> float:
        fresh = dist.PrefixStore(f"bare/{next(lives)}", store)  # old keys would be met again
        took = together(barrier, lambda: dist.init_process_group("gloo", store=fresh, **who))
        barrier.wait()
        dist.destroy_process_group()
        return took

    hook = sys.excepthook
    measured = pairs(ours, theirs, number)
    sys.excepthook = hook

    # One more life, to which the last rank comes a second late. What it asks, but for looking again
    # at the key it waits for, is what a rank asks once all are there; what the others ask
    # meanwhile is the cost of waiting.
    counting = counting_store(store)
    late = rank == world_size - 1
    barrier.wait()
    time.sleep(late)
    with DistributedRuntime("gloo", store=counting, **who):
        barrier.wait()  # by now each has said that it has built
        ours_only = {k: n for k, n in counting.requests.copy().items() if "/group/" not in k}
        of_torch = counting.requests.total() - sum(ours_only.values())
        number = sum(1 if late else n for n in ours_only.values())
        requests = late, number, of_torch
        barrier.wait()
    return measured, requests


def counting_store(inner: Any) -> Any:
    """A store that hands all on to ``inner``, and counts the requests by key."""
    import torch.distributed as dist

    class Counting(dist.Store):
        def __init__(self) -> None:
            super().__init__()
            self.requests: Counter[str] = Counter()

        def set(self, key: str, value: Any) -> None:
            self.requests[key] += 1
            inner.set(key, value if isinstance(value, (str, bytes)) else bytes(value))

        def get(self, key: str) -> bytes:
            self.requests[key] += 1
            return bytes(inner.get(key))

        def add(self, key: str, value: int) -> int:
            self.requests[key] += 1
            return int(inner.add(key, value))

        def compare_set(self, key: str, expected: str, value: str) -> bytes:
            self.requests[key] += 1
            return bytes(inner.compare_set(key, expected, value))

        def wait(self, keys: list[str], *timeout: timedelta) -> None:
            self.requests[keys[0]] += 1
            inner.wait(keys, *timeout)

    return Counting()


def on_ranks(world_size: int, environ: dict[str, str], act: Callable[..., Any], *args: Any) -> Any:
    """What ``act(environ, *args, barrier)`` gives on each rank."""
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


def first_starts(world_size: int, number: int, *, served: bool) -> Ratio:
    """Pairs of first starts, each in new processes."""
    import torch.distributed as dist

    def start(ours: bool) -> float:
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if served:
            # Like an agent's, but on loopback alone: a server on all interfaces looks up the name
            # of each peer, and is at times held up by that for seconds.
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            keep = dist.TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        took = max(on_ranks(world_size, environ, first_start, ours))
        if served:
            del keep
        return took

    ours, theirs = pairs(lambda: start(True), lambda: start(False), number)
    who = "a launcher serves the store" if served else "rank 0 serves the store"
    at_most = 1.10 if world_size == 4 and not served else None
    return Ratio(f"{world_size} ranks, first start, {who}", ours, theirs, at_most)


def main() -> tuple[list[Ratio], list[str]]:
    """All starts at all world sizes."""
    context.set_forkserver_preload(["torch.distributed", "distctx.start", "distctx.runtime"])
    rows, lines = [], []
    for world_size, (firsts, laters) in RANKS.items():
        rows += [first_starts(world_size, firsts, served=served) for served in (False, True)]
        told = on_ranks(world_size, {"MASTER_PORT": str(free_port())}, later_starts, laters)
        ours, theirs = (
            [max(measured[side][i] for measured, _ in told) for i in range(laters)]
            for side in (0, 1)
        )
        rows.append(Ratio(f"{world_size} ranks, later start, one kept store", ours, theirs))
        counts = [requests for _, requests in told]
        last = next(number for is_last, number, _ in counts if is_last)
        waits = max(number for is_last, number, _ in counts if not is_last)
        torchs = max(number for _, _, number in counts)
        lines.append(
            f"{world_size} ranks: {last} requests of the rank that comes last, at most {waits} of "
            f"one that waits a second for it; torch's init makes up to {torchs}"
        )
    return rows, lines


if __name__ == "__main__":
    table, lines = main()
    report(table, lines)
