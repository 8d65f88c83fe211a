"""What every benchmark shares: interleaved pairs, their ratio and its spread, the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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


def report(rows: Sequence[Ratio]) -> None:
    """Print the table of ratios, and the machine."""
    from distctx.display import table

    header = ("question", "median ratio", "quartiles", "ours / theirs", "pairs", "must be")
    print(table([row.row() for row in rows], header))
    print(f"\n{machine()}", flush=True)
