"""The mesh against ``init_device_mesh``: how its cost grows with the world, and on real ranks.

Simulated ranks: each build in a process of its own, forked from one that has imported torch; a
small build comes first there, so that what is measured is the mesh, not the loading of code. Memory
is what the process holds more at its highest. Real ranks: gloo, one kept store on both sides, begun
at once; the slowest rank counts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.common import (
    PAIRS,
    Findings,
    Ratio,
    exponent,
    on_log_axes,
    pairs,
    report,
)
from benchmarks.ranks import (
    counting_store,
    free_port,
    kept_store,
    on_ranks,
    over_ranks,
    paired,
    together,
)

NAMES = ("pp", "dp", "tp")

#: Shapes of simulated meshes, and what the ratio of the times must not pass.
SIMULATED = {
    (4, 4, 4): None,
    (8, 8, 8): None,
    (16, 16, 16): 1 / 8,
    (32, 32, 32): None,
    (64, 32, 32): 1 / 20,
    (64, 64, 64): 1 / 20,
}

#: From how many ranks on a mesh is more than the pages that a process takes anyhow.
SEEN_IN_MEMORY = 32_768

#: Shapes of meshes of real ranks.
REAL = ((2, 2), (4, 2), (4, 4), (8, 4), (8, 8))


@contextlib.contextmanager
def our_world(shape: tuple[int, ...]) -> Iterator[Callable[[], object]]:
    """What builds the mesh of a simulated world that is open."""
    from distctx import DistributedRuntime

    world_size = math.prod(shape)
    with DistributedRuntime.simulate(
        world_size - 2, world_size, mesh_shape=shape, mesh_dim_names=NAMES
    ) as rt:
        yield lambda: rt.mesh


@contextlib.contextmanager
def their_world(shape: tuple[int, ...]) -> Iterator[Callable[[], object]]:
    """The same with torch alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world_size = math.prod(shape)
    dist.init_process_group("fake", store=FakeStore(), rank=world_size - 2, world_size=world_size)
    yield lambda: init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    dist.destroy_process_group()


def resident(name: str) -> int:
    """Bytes that this process holds: ``VmRSS`` now, ``VmHWM`` at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def simulated_build(
    environ: dict[str, str], shape: tuple[int, ...], ours: bool, barrier: Any
) -> tuple[float, int]:
    """Seconds and bytes of one build, as the last rank but one of a world that does not exist."""
    world = our_world if ours else their_world
    with world((2, 2, 2)) as build:
        build()
    with world(shape) as build:
        Path("/proc/self/clear_refs").write_text("5")  # the highest is now
        before = resident("VmRSS")
        took = together(barrier, build)
        return took, resident("VmHWM") - before


def simulated(number: int) -> Findings:
    """Time and memory against the number of ranks."""
    times, memory = [], []
    for shape, at_most in SIMULATED.items():
        ranks = math.prod(shape)

        def build(ours: bool, shape: tuple[int, ...] = shape) -> tuple[float, int]:
            told: tuple[float, int] = on_ranks(1, {}, simulated_build, shape, ours)[0]
            return told

        ours, theirs = pairs(lambda: build(True), lambda: build(False), number)
        question = f"3-D mesh of {ranks} simulated ranks"
        times.append(Ratio(question, [a for a, _ in ours], [b for b, _ in theirs], at_most))
        if ranks >= SEEN_IN_MEMORY:
            held = [[bytes_ / 2**20 for _, bytes_ in side] for side in (ours, theirs)]
            memory.append(Ratio(f"{question}, memory", held[0], held[1], unit="MiB"))
    return Findings([*times, *memory], growth(times))


def growth(times: list[Ratio]) -> list[str]:
    """How the times grow: a plot, and the exponents."""
    sizes = [math.prod(shape) for shape in SIMULATED]
    sides = {
        "distctx": [median(row.ours) for row in times],
        "init_device_mesh": [median(row.theirs) for row in times],
    }
    lines = ["", "Time of a 3-D mesh of simulated ranks, both axes logarithmic:"]
    lines += on_log_axes(sizes, sides)
    for name, costs in sides.items():
        small, large = exponent(sizes[:3], costs[:3]), exponent(sizes[3:], costs[3:])
        lines.append(
            f"{name} grows with the power {small:.2f} of the ranks up to {sizes[2]}, and "
            f"{large:.2f} from {sizes[3]} on"
        )
    return lines


def real_builds(environ: dict[str, str], shape: tuple[int, ...], number: int, barrier: Any) -> Any:
    """One rank's builds, pair by pair: seconds, and requests at the store."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from distctx import DistributedRuntime

    who, store = kept_store(environ)
    counting = counting_store(store)
    lives = iter(range(10**9))

    def ours(store: Any) -> tuple[float, int]:
        rt = DistributedRuntime(
            "gloo", store=store, mesh_shape=shape, mesh_dim_names=NAMES[1:], **who
        )
        with rt:
            asked = counting.requests.total()
            took = together(barrier, lambda: rt.mesh)
            barrier.wait()
            return took, counting.requests.total() - asked

    def theirs(store: Any) -> tuple[float, int]:
        fresh = dist.PrefixStore(f"bare/{next(lives)}", store)
        dist.init_process_group("gloo", store=fresh, **who)
        asked = counting.requests.total()
        took = together(barrier, lambda: init_device_mesh("cpu", shape, mesh_dim_names=NAMES[1:]))
        barrier.wait()
        asked = counting.requests.total() - asked
        dist.destroy_process_group()
        return took, asked

    times = paired(lambda: ours(store)[0], lambda: theirs(store)[0], number)
    requests = paired(lambda: ours(counting)[1], lambda: theirs(counting)[1], number)
    return times, requests


def real(number: int) -> list[Ratio]:
    """Time and requests of a 2-D mesh of gloo ranks."""
    rows = []
    for shape in REAL:
        ranks = math.prod(shape)
        told = on_ranks(ranks, {"MASTER_PORT": str(free_port())}, real_builds, shape, number)
        question = f"2-D mesh of {ranks} gloo ranks"
        ours, theirs = over_ranks([times for times, _ in told])
        rows.append(Ratio(question, ours, theirs, 1.0))
        ours, theirs = over_ranks([requests for _, requests in told], mean)
        rows.append(Ratio(f"{question}, requests of a rank", ours, theirs, 1.0, ""))
    return rows


def main(number: int = PAIRS) -> Findings:
    """Simulated ranks, then real ones."""
    found = simulated(number)
    return Findings([*found.rows, *real(number)], found.lines)


if __name__ == "__main__":
    report(main())
