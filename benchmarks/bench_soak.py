"""Life after life of a runtime: what fails, and what each leaves behind.

``python -m benchmarks.bench_soak [LIVES [RANKS]]``; without arguments 1,000 lives of one rank, then
200 of four. Lives differ: some build a mesh, of changing shapes, some pause, each ends with a
collective or at once. What a process holds is counted after a tenth of them and at the end.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import attrs

from benchmarks.common import machine, tell, told_by_ranks, with_unit


@attrs.frozen
class Held:
    """What a process holds; ``memory`` is what is resident, in bytes."""

    threads: int
    python_threads: int
    descriptors: int
    groups: int | None
    memory: int
    excepthook: bool
    environ: bool

    @classmethod
    def now(cls, environ: dict[str, str], hook: Any) -> Held:
        """Count it. ``environ`` and ``hook`` are what they were at the start."""
        from distctx import _torch

        gc.collect()
        time.sleep(1.0)  # a thread that waits for the next call ends after half a second
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            threads=len(os.listdir("/proc/self/task")),
            python_threads=threading.active_count(),
            descriptors=len(os.listdir("/proc/self/fd")),
            groups=_torch.number_of_groups(),
            memory=pages * os.sysconf("SC_PAGE_SIZE"),
            excepthook=sys.excepthook is not hook,
            environ=dict(os.environ) != environ,
        )


def life(number: int, chance: random.Random) -> None:
    """One life, which must add up what it should."""
    import torch
    import torch.distributed as dist

    from distctx import DistributedRuntime

    even = int(os.environ.get("WORLD_SIZE", "1")) % 2 == 0
    shape = ((-1,), (1, -1), (-1, 2 if even else 1), (-1, 1, 1))[number % 4]
    with DistributedRuntime(
        "gloo", mesh_shape=shape, timeout=60, rendezvous_timeout=60, dp_mesh_dim=0
    ) as rt:
        if number % 3 == 0:
            time.sleep(chance.random() / 100)
        if number % 5 == 0:
            return
        dim = number % rt.layout.ndim
        group, ranks = (None, range(rt.world_size))
        if number // 4 % 2:
            group, ranks = rt.group(dim), rt.ranks(dim)
        total = torch.tensor([rt.rank + number])
        dist.all_reduce(total, group=group)
        if total.item() != sum(rank + number for rank in ranks):
            raise ValueError(f"life {number}: {total.item()} is wrong")


def soak(lives: int) -> dict[str, Any]:
    """Live, and say what failed, and what was held at a tenth of it and at the end."""
    import torch.distributed  # noqa: F401  so that its own threads and files are there before

    environ, hook = dict(os.environ), sys.excepthook
    chance = random.Random(int(os.environ.get("RANK", "0")))
    failures, took = [], []
    early = None
    for number in range(lives):
        start = time.perf_counter()
        try:
            life(number, chance)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
        took.append(time.perf_counter() - start)
        if number == lives // 10:
            early = Held.now(environ, hook)
    assert early is not None
    late = Held.now(environ, hook)
    return {"failures": failures, "early": attrs.asdict(early), "late": attrs.asdict(late)} | {
        "seconds": sorted(took)[len(took) // 2]
    }


def run(lives: int, ranks: int) -> list[dict[str, Any]]:
    """What ``soak`` tells on each rank of a torchrun job; of plain python where there is one."""
    return told_by_ranks("benchmarks.bench_soak", ranks, str(lives))


def main(jobs: list[tuple[int, int]]) -> None:
    """Run the jobs, print what came of each."""
    from distctx.display import table

    header = ("ranks", "lives", "failures", "a life", "threads", "descriptors", "groups", "memory")
    rows = []
    for lives, ranks in jobs:
        told = run(lives, ranks)
        changed = {n for one in told for n in ("excepthook", "environ") if one["late"][n]}
        seen = [error for one in told for error in one["failures"]]
        seen += [f"changed: {name}" for name in sorted(changed)]
        grown = {
            name: max(one["late"][name] - one["early"][name] for one in told)
            for name in ("threads", "descriptors", "groups", "memory")
        }
        counted = lives - lives // 10 - 1
        rows.append(
            (
                str(ranks),
                str(lives),
                f"{len(seen)} {seen[0] if seen else ''}".strip(),
                with_unit(max(one["seconds"] for one in told)),
                *(f"{grown[name]:+d}" for name in ("threads", "descriptors", "groups")),
                f"{grown['memory'] / counted:+.0f} B a life",
            )
        )
    print(table(rows, header))
    print(f"\n{machine()}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in"]:
        tell(sys.argv[2], soak(int(sys.argv[3])))
    elif len(sys.argv) > 1:
        lives, ranks = [*map(int, sys.argv[1:]), 1][:2]
        main([(lives, ranks)])
    else:
        main([(1000, 1), (200, 4)])
