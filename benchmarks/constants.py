"""The constants from which README.rst plans for 100,000 ranks: ``python -m benchmarks.constants``.

Not a comparison: what one store, one host and gloo take here, without ratios.
"""

from __future__ import annotations

import json
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.common import machine
from benchmarks.ranks import counting_store, free_port, kept_store, on_ranks

REQUESTS = 5_000


def requests(environ: dict[str, str], barrier: Any) -> float:
    """Seconds of one of this rank's requests while all ask at once; rank 0 serves and asks none."""
    who, store = kept_store(environ)
    barrier.wait()
    start = perf_counter()
    if who["rank"]:
        for _ in range(REQUESTS):
            store.add("count", 1)
    took = perf_counter() - start
    barrier.wait()
    return took / REQUESTS


def gloo(environ: dict[str, str], barrier: Any) -> tuple[int, int]:
    """Bytes of what gloo says of this rank to all others, and of what distctx says of it."""
    from distctx import DistributedRuntime

    who, store = kept_store(environ)
    counting = counting_store(store)
    barrier.wait()
    with DistributedRuntime("gloo", store=counting, **who):
        barrier.wait()
    rank, sizes = str(who["rank"]), counting.sizes.items()
    word = next(size for key, size in sizes if "/group/" in key and key.endswith(rank))
    card = next(size for key, size in sizes if key.endswith(f"rank/{rank}"))
    return word, card


def main() -> None:
    """Print them."""
    environ = {"MASTER_PORT": str(free_port())}
    for clients in (1, 7):
        each = max(on_ranks(clients + 1, environ, requests))
        print(f"{clients} clients at once: {clients / each:,.0f} requests a second")
        environ["MASTER_PORT"] = str(free_port())
    sizes = {}
    for world_size in (2, 4, 8, 16):
        environ["MASTER_PORT"] = str(free_port())
        told = on_ranks(world_size, environ, gloo)
        sizes[world_size] = [median(column) for column in zip(*told, strict=True)]
    print("ranks: bytes of gloo's word, of a rank's card:", json.dumps(sizes))
    print(machine())


if __name__ == "__main__":
    main()
