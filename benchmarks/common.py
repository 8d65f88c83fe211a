"""What every benchmark shares: interleaved pairs, their ratio and its spread, the machine."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence

import attrs


@attrs.frozen
class Ratio:
    """What came of one comparison: seconds of both sides, pair by pair."""

    question: str
    ours: Sequence[float]
    theirs: Sequence[float]
    must: str = ""

    @property
    def ratios(self) -> list[float]:
        """ours ÷ theirs, pair by pair."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    def row(self) -> tuple[str, ...]:
        """The row of the table: median ratio, its quartiles, the medians of both sides."""
        low, middle, high = statistics.quantiles(self.ratios, n=4)
        return (
            self.question,
            f"{middle:.4g}",
            f"{low:.4g} to {high:.4g}",
            f"{seconds(statistics.median(self.ours))} / {seconds(statistics.median(self.theirs))}",
            str(len(self.ours)),
            self.must,
        )


def seconds(value: float) -> str:
    """A time with the unit that fits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def pairs(
    ours: Callable[[], float], theirs: Callable[[], float], number: int
) -> tuple[list[float], list[float]]:
    """Measure the two in turn, after one round that does not count; every other pair in turn."""
    ours(), theirs()
    a: list[float] = []
    b: list[float] = []
    for i in range(number):
        if i % 2:
            b.append(theirs())
            a.append(ours())
        else:
            a.append(ours())
            b.append(theirs())
    return a, b


def machine() -> str:
    """The machine, in one line."""
    import torch

    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as info:
            model = (
                next(line for line in info if line.startswith("model name")).split(": ")[1].strip()
            )
    except (OSError, StopIteration):
        pass
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} × {model}, load {load:.1f}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {sys.platform}"
    )


def report(rows: Sequence[Ratio]) -> None:
    """Print the table of ratios, and the machine."""
    from distctx.display import table

    header = ("question", "median ratio", "quartiles", "ours / theirs", "pairs", "must be")
    print(table([row.row() for row in rows], header))
    print(f"\n{machine()}", flush=True)
