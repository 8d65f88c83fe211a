"""What every benchmark shares: interleaved rounds, ratios and their spread, ranks, the machine."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import attrs

Cost = TypeVar("Cost")

#: The least number of pairs that a ratio stands on.
PAIRS = 7


@attrs.frozen
class Ratio:
    """What came of one comparison: seconds, or another cost, of both sides, pair by pair."""

    question: str
    ours: Sequence[float]
    theirs: Sequence[float]
    #: What the median ratio must not pass; None where nothing was promised.
    at_most: float | None = None
    unit: str = "s"

    @property
    def ratios(self) -> list[float]:
        """ours ÷ theirs, pair by pair."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def is_missed(self) -> bool:
        """Whether the median ratio passes what it must not."""
        return self.at_most is not None and statistics.median(self.ratios) > self.at_most

    def row(self) -> tuple[str, ...]:
        """The row of the table."""
        low, middle, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        bound = "" if self.at_most is None else f"{self.at_most:.3g}"
        sides = " / ".join(
            with_unit(statistics.median(side), self.unit) for side in (self.ours, self.theirs)
        )
        return (
            self.question,
            f"{middle:.3g}",
            f"{low:.3g} to {high:.3g}",
            bound + (", missed" if self.is_missed else ""),
            sides,
            str(len(self.ours)),
        )


@attrs.frozen
class Findings:
    """What a benchmark found: the rows of its table, and lines that belong below it."""

    rows: Sequence[Ratio]
    lines: Sequence[str] = ()


HEADER = ("ours / theirs", "ratio", "quartiles", "at most", "medians", "pairs")


def with_unit(value: float, unit: str = "s") -> str:
    """A cost with the unit that fits."""
    if unit != "s":
        return f"{value:.3g} {unit}".rstrip()
    for name, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value / 1e-9:.3g} ns"


def rounds(sides: Mapping[str, Callable[[], Cost]], number: int) -> dict[str, list[Cost]]:
    """Measure all sides in turn, so many times, after one round that does not count; each round
    begins with another side."""
    names = list(sides)
    for name in names:
        sides[name]()
    took: dict[str, list[Cost]] = {name: [] for name in names}
    for i in range(number):
        start = i % len(names)
        for name in names[start:] + names[:start]:
            took[name].append(sides[name]())
    return took


def pairs(
    ours: Callable[[], Cost], theirs: Callable[[], Cost], number: int
) -> tuple[list[Cost], list[Cost]]:
    """Two sides, measured in turn."""
    took = rounds({"ours": ours, "theirs": theirs}, number)
    return took["ours"], took["theirs"]


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of cost against size on log axes: 1 grows with the size, 0 does not grow."""
    logs = [[math.log(value) for value in axis] for axis in (sizes, costs)]
    return statistics.linear_regression(*logs).slope


def on_log_axes(
    sizes: Sequence[int], sides: Mapping[str, Sequence[float]], width: int = 40
) -> list[str]:
    """Seconds against sizes, as a plot of text whose axes are logarithmic: a line for each
    doubling of the size, a mark for each side."""
    costs = [cost for side in sides.values() for cost in side]
    low = math.log(min(costs))
    scale = (width - 1) / (math.log(max(costs)) - low)
    marks = dict(zip(sides, "ox*+", strict=False))
    lines = [", ".join(f"{mark} {name}" for name, mark in marks.items())]
    size = sizes[0]
    while size <= sizes[-1]:
        plot, said = [" "] * width, ""
        if size in sizes:
            here = {name: side[sizes.index(size)] for name, side in sides.items()}
            for name, cost in here.items():
                plot[round((math.log(cost) - low) * scale)] = marks[name]
            said = ", ".join(with_unit(cost) for cost in here.values())
        lines.append(f"{size:>9} |{''.join(plot)}| {said}".rstrip())
        size *= 2
    return lines


def is_here(module: str) -> bool:
    """Whether a peer is installed."""
    return importlib.util.find_spec(module) is not None


def told_by_ranks(module: str, ranks: int, *arguments: str) -> list[Any]:
    """What ``python -m MODULE --in FOLDER ARGUMENT…`` told of itself, by rank; several ranks are a
    torchrun job."""
    with TemporaryDirectory() as folder:
        command = ["-m", module, "--in", folder, *arguments]
        if ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone"]
            command = [*launcher, f"--nproc-per-node={ranks}", *command]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command], env=environ, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{module} on {ranks} ranks failed:\n{done.stderr}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def tell(folder: str, value: Any) -> None:
    """Tell ``told_by_ranks`` a value that goes into JSON, as this rank."""
    Path(folder, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(value))


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


def as_text(rows: Sequence[Ratio]) -> str:
    """The table of ratios, for a terminal."""
    from distctx.display import table

    return table([row.row() for row in rows], HEADER)


def as_markdown(rows: Sequence[Ratio]) -> str:
    """The same in Markdown."""
    lines = [HEADER, tuple("---" for _ in HEADER), *(row.row() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_rst(rows: Sequence[Ratio]) -> str:
    """The same in reStructuredText, without the medians: of those the ratio is what counts."""
    columns = [(*row.row()[:4], row.row()[5]) for row in rows]
    lines = [(*HEADER[:4], HEADER[5]), *columns]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = "  ".join("=" * width for width in widths)
    body = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([rule, body[0], rule, *body[1:], rule])


def report(found: Findings) -> None:
    """Print the table of ratios, what is to be said of them, and the machine."""
    print(as_text(found.rows), *found.lines, f"\n{machine()}", sep="\n", flush=True)
