"""Looking things up: a runtime against a bare property or method, and against a DeviceMesh."""

from __future__ import annotations

import math
import sys
import timeit
from collections.abc import Callable
from typing import Any

import attrs

from benchmarks.common import Findings, Ratio, pairs, report

NAMES = ("pp", "dp", "tp")
SMALL, LARGE = (2, 2, 2), (64, 64, 64)

#: How often a cheap expression is evaluated in one measurement.
TIMES = 20_000


class Bare:
    """The least that Python needs for a property, and for a method that looks into a dict."""

    __slots__ = ("_found", "_value")

    def __init__(self) -> None:
        self._value = (4, 1)
        self._found = {("tp",): 1}

    @property
    def value(self) -> tuple[int, int]:
        return self._value

    def method(self, *dims: str) -> int:
        return self._found[dims]


@attrs.frozen
class Question:
    """What a runtime is asked, the least that could cost, and how a DeviceMesh is asked."""

    ours: str
    bare: str
    torchs: str
    #: What the ratio to DeviceMesh must not pass. None: torch keeps the answer in a field too.
    at_most: float | None = 0.01


QUESTIONS = (
    Question("rt.dp_partition", "bare.value", "mesh.mesh.shape"),
    Question("rt.tp_size", "bare.value", "mesh.mesh.shape"),
    Question("rt.coordinate", "bare.value", "mesh.get_coordinate()", None),
    Question('rt.index("tp")', 'bare.method("tp")', 'mesh["tp"].get_local_rank()'),
    Question('rt.submesh("tp")', 'bare.method("tp")', 'mesh["tp"]'),
)


def each(code: str, known: dict[str, Any], times: int) -> Callable[[], float]:
    """Seconds of one evaluation of ``code``, over ``times`` of them."""
    timer = timeit.Timer(code, globals=known)
    return lambda: timer.timeit(times) / times


def lookups(shape: tuple[int, ...], number: int) -> list[Ratio]:
    """All comparisons in one simulated world; nothing is computed by its collectives."""
    from distctx import DistributedRuntime
    from distctx.mesh import resolve_data_parallel_partition

    world = math.prod(shape)
    few = 200 if world < 1000 else 4  # a DeviceMesh of many ranks takes milliseconds
    rows = []
    with DistributedRuntime.simulate(
        world - 2, world, mesh_shape=shape, mesh_dim_names=NAMES
    ) as rt:
        known = {"rt": rt, "mesh": rt.mesh, "bare": Bare()}
        known["partition"] = resolve_data_parallel_partition

        def compare(ours: str, theirs: str, times: int, at_most: float | None) -> None:
            a, b = pairs(each(ours, known, TIMES), each(theirs, known, times), number)
            rows.append(Ratio(f"{ours} / {theirs}, {world} ranks", a, b, at_most))

        for question in QUESTIONS:
            compare(question.ours, question.bare, TIMES, 3.0)
        for question in QUESTIONS:
            compare(question.ours, question.torchs, few, question.at_most)
        compare('rt.index("tp")', 'mesh.get_local_rank("tp")', few, None)
        compare("rt.dp_partition", 'partition(mesh, "dp", True)', few, None)
    return rows


def main(number: int = 15) -> Findings:
    """At 8 and at 262,144 simulated ranks."""
    hook = sys.excepthook
    small, large = lookups(SMALL, number), lookups(LARGE, number)
    sys.excepthook = hook
    # One process has one world, so the two sizes cannot take turns: each is held against the bare
    # lookup of its own time.
    growth = [
        Ratio(
            f"{question.ours}, 262144 ranks / 8 ranks", in_large.ratios, in_small.ratios, 1.25, ""
        )
        for question, in_large, in_small in zip(QUESTIONS, large, small, strict=False)
    ]
    return Findings([*small, *large, *growth])


if __name__ == "__main__":
    report(main())
