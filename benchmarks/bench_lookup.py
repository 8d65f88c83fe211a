"""Looking things up: a runtime against a bare property, and against torch's DeviceMesh."""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from typing import Any

from benchmarks.common import Ratio, pairs, report

NAMES = ("pp", "dp", "tp")
SMALL, LARGE = (2, 2, 2), (64, 64, 64)


class Bare:
    """The least that Python needs for a property."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = (4, 1)

    @property
    def value(self) -> tuple[int, int]:
        return self._value


def each(code: str, of: Any, times: int) -> Callable[[], float]:
    """Seconds of one evaluation of ``code``, over ``times`` of them."""
    from distctx.mesh import resolve_data_parallel_partition

    timer = timeit.Timer(code, globals={"o": of, "resolve": resolve_data_parallel_partition})
    return lambda: timer.timeit(times) / times


def lookups(shape: tuple[int, ...], number: int) -> list[Ratio]:
    """All comparisons in one simulated world; nothing is computed by its collectives."""
    import math

    from distctx import DistributedRuntime

    world = math.prod(shape)
    rows = []
    with DistributedRuntime(
        "fake", rank=world - 2, world_size=world, mesh_shape=shape, mesh_dim_names=NAMES
    ) as rt:
        mesh, bare = rt.mesh, Bare()
        rt.submesh("tp")
        few, many = (200 if world < 1000 else 4), 20_000

        def compare(
            question: str, ours: Any, theirs: Any, times: int, at_most: float | None
        ) -> None:
            a, b = pairs(each(*ours, many), each(*theirs, times), number)
            rows.append(Ratio(f"{question}, {world} ranks", a, b, at_most))

        partition, tp_size = ("o.dp_partition", rt), ("o.tp_size", rt)
        property_, shape_of = ("o.value", bare), ("o.mesh.shape", mesh)
        compare("dp_partition / bare property", partition, property_, many, 3.0)
        compare("tp_size / bare property", tp_size, property_, many, 3.0)
        compare("dp_partition / mesh.mesh.shape", partition, shape_of, few, 0.01)
        compare("tp_size / mesh.mesh.shape", tp_size, shape_of, few, 0.01)
        again, sliced = ("o.submesh('tp')", rt), ("o['tp']", mesh)
        compare('submesh("tp") again / mesh["tp"]', again, sliced, few, 0.01)
        functional = ("resolve(o, 'dp', True)", mesh)
        compare("dp_partition / the functional layer", partition, functional, few, None)
    return rows


def main(number: int = 15) -> list[Ratio]:
    """At 8 and at 262,144 simulated ranks."""
    hook = sys.excepthook
    small, large = lookups(SMALL, number), lookups(LARGE, number)
    sys.excepthook = hook
    again = [
        next(row for row in rows if row.question.startswith("submesh")) for rows in (large, small)
    ]
    same = Ratio('submesh("tp") again, 262144 ranks / 8 ranks', again[0].ours, again[1].ours, 1.5)
    return [*small, *large, same]


if __name__ == "__main__":
    report(main())
