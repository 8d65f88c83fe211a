"""Entering and leaving a world against bare init and destroy: same ranks, one kept store."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from benchmarks.common import Findings, Ratio, pairs, report, tell, told_by_ranks

LIVES = 10
RANKS = (1, 4)


def measure(number: int) -> tuple[list[float], list[float]]:
    """Seconds a life, pair by pair, as this rank sees them; all ranks measure the same at once."""
    import torch.distributed as dist

    from distctx import DistributedRuntime

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    timeout = timedelta(seconds=60)
    if world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    lives = iter(range(10**9))

    def together(act: Callable[[], object]) -> float:
        """Seconds of ``act``, begun at once on all ranks: bare torch fails where one destroys its
        group while others still connect."""
        key = f"start/{next(lives)}"
        store.add(key, 1)
        while store.add(key, 0) < world_size:
            time.sleep(0.0005)
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    def ours() -> float:
        rt = DistributedRuntime("gloo", timeout=timeout)
        return together(rt.open) + together(rt.close)

    def start() -> None:
        fresh = dist.PrefixStore(f"life/{next(lives)}", store)
        dist.init_process_group(
            "gloo", store=fresh, rank=rank, world_size=world_size, timeout=timeout
        )

    def theirs() -> float:
        return together(start) + together(dist.destroy_process_group)

    def mean_of(one: Callable[[], float]) -> Callable[[], float]:
        return lambda: sum(one() for _ in range(LIVES)) / LIVES

    hook = sys.excepthook
    a, b = pairs(mean_of(ours), mean_of(theirs), number)
    sys.excepthook = hook
    return a, b


def main(number: int = 15) -> Findings:
    """Each world size in a torchrun job of its own; rank 0's times count."""
    rows = []
    for ranks in RANKS:
        a, b = told_by_ranks("benchmarks.bench_lifecycle", ranks, str(number))[0]
        plural = "s" if ranks > 1 else ""
        rows.append(Ratio(f"enter + exit / init + destroy, {ranks} rank{plural}", a, b, 1.10))
    return Findings(rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in"]:
        tell(sys.argv[2], measure(int(sys.argv[3])))
    else:
        report(main())
