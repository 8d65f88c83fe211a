"""What importing distctx costs: on top of torch, and alone."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.common import Ratio, pairs, report

_TIMED = """
import time
start = time.perf_counter()
{first}
middle = time.perf_counter()
{second}
print(middle - start, time.perf_counter() - middle)
"""


def timed(first: str, second: str) -> tuple[float, float]:
    """Seconds of two statements, one after the other, in a fresh interpreter."""
    code = _TIMED.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    a, b = map(float, done.stdout.split())
    return a, b


def process(*arguments: str) -> float:
    """Seconds of a whole process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main(number: int = 11) -> list[Ratio]:
    """Each pair is one fresh interpreter, so both sides meet the same machine."""
    for module in ("import distctx", "import distctx.layout, distctx.environment"):
        code = f"{module}\nimport sys\nsys.exit('torch' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)
    after, alone, layout = [], [], []
    for _ in range(number + 1):  # the first one warms the disk
        after.append(timed("import torch", "from distctx import DistributedRuntime")[::-1])
        package, torch = timed("import distctx", "import torch")
        alone.append((package, torch))
        layout.append((timed("from distctx import MeshLayout", "pass")[0], torch))
    command = ("-m", "distctx", "layout", "--mesh", "dp=-1,tp=8", "--world-size", "1048576")
    ours, theirs = pairs(lambda: process(*command), lambda: process("-c", "import torch"), number)
    question = "layout of 2^20 ranks / import torch, whole processes"
    whole = Ratio(question, ours, theirs)
    return [
        Ratio(question, *zip(*measured[1:], strict=True), must)
        for question, measured, must in (
            ("DistributedRuntime after torch / import torch", after, 0.03),
            ("import distctx / import torch", alone, None),
            ("from distctx import MeshLayout / import torch", layout, None),
        )
    ] + [whole]


if __name__ == "__main__":
    report(main())
