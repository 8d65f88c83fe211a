"""Meeting and init against torch's bare init, and what each asks of the store.

The ranks are forked from a process that has imported torch, and begin at once; a time is that of
the rank which is through last. Three starts: a job's first, where rank 0 serves the store; the
first where a launcher serves it; and a later one, in a store that is open already on both sides.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from benchmarks.common import Findings, Ratio, pairs, report
from benchmarks.ranks import (
    TIMEOUT,
    counting_store,
    free_port,
    kept_store,
    on_ranks,
    over_ranks,
    paired,
    together,
)

#: How many ranks, and how many pairs of first starts and of later ones.
RANKS = {2: (9, 41), 4: (15, 81), 8: (9, 31), 16: (7, 15), 32: (7, 9), 64: (7, 7)}


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

    who, store = kept_store(environ)
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

    measured = paired(ours, theirs, number)

    # One more life, to which the last rank comes a second late. What it asks, but for looking again
    # at the key it waits for, is what a rank asks once all are there; what the others ask
    # meanwhile is the cost of waiting.
    counting = counting_store(store)
    late = who["rank"] == who["world_size"] - 1
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


def main() -> Findings:
    """All starts at all world sizes."""
    rows, lines = [], []
    for world_size, (firsts, laters) in RANKS.items():
        rows += [first_starts(world_size, firsts, served=served) for served in (False, True)]
        told = on_ranks(world_size, {"MASTER_PORT": str(free_port())}, later_starts, laters)
        ours, theirs = over_ranks([measured for measured, _ in told])
        rows.append(Ratio(f"{world_size} ranks, later start, one kept store", ours, theirs))
        counts = [requests for _, requests in told]
        last = next(number for is_last, number, _ in counts if is_last)
        waits = max(number for is_last, number, _ in counts if not is_last)
        torchs = max(number for _, _, number in counts)
        lines.append(
            f"{world_size} ranks: {last} requests of the rank that comes last, at most {waits} of "
            f"one that waits a second for it; torch's init makes up to {torchs}"
        )
    return Findings(rows, lines)


if __name__ == "__main__":
    report(main())
