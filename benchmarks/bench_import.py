"""What importing distctx costs, and what a layout costs from the command line."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.common import Findings, Ratio, is_here, pairs, report

_TIMED = """
import time
start = time.perf_counter()
{first}
middle = time.perf_counter()
{second}
print(middle - start, time.perf_counter() - middle)
"""

_OURS = "from distctx import DistributedRuntime"

#: Who else brings an object that owns the process group, and how it is imported.
_PEERS = {
    "accelerate": "from accelerate import Accelerator",
    "lightning_fabric": "from lightning_fabric import Fabric",
}

#: The command, and what a script needs to see the same groups.
_LAYOUT = (
    *("-m", "distctx", "layout", "--mesh", "dp=-1,tp=8"),
    *("--world-size", "1048576", "--rank", "1000000"),
)
_SCRIPT = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=1000000, world_size=1048576)
mesh = init_device_mesh("cpu", (131072, 8), mesh_dim_names=("dp", "tp"))
print(mesh.mesh, mesh.get_coordinate(), mesh["tp"].mesh)
"""


def timed(first: str, second: str) -> tuple[float, float]:
    """Seconds of two statements, one after the other, in a fresh interpreter."""
    code = _TIMED.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    a, b = map(float, done.stdout.splitlines()[-1].split())
    return a, b


def process(*arguments: str) -> float:
    """Seconds of a whole process."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def main(number: int = 11) -> Findings:
    """Where both sides fit into one fresh interpreter, a pair is one."""
    for module in ("import distctx", "import distctx.layout, distctx.environment"):
        code = f"{module}\nimport sys\nsys.exit('torch' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)
    after, alone, layout = [], [], []
    for _ in range(number + 1):  # the first one warms the disk
        after.append(timed("import torch", _OURS)[::-1])
        alone.append(timed("import distctx", "import torch"))
        layout.append(timed("from distctx import MeshLayout", "import torch"))
    rows = [
        Ratio(question, *zip(*measured[1:], strict=True), at_most)
        for question, measured, at_most in (
            (f"{_OURS} after torch / import torch", after, 0.03),
            ("import distctx / import torch", alone, None),
            ("from distctx import MeshLayout / import torch", layout, None),
        )
    ]
    for module, theirs in _PEERS.items():
        if is_here(module):
            measured = pairs(
                lambda: timed("import torch", _OURS)[1],
                lambda theirs=theirs: timed("import torch", theirs)[1],
                number,
            )
            rows.append(Ratio(f"{_OURS} / {theirs}, after torch", *measured, 1.0))
    measured = pairs(lambda: process(*_LAYOUT), lambda: process("-c", "import torch"), number)
    rows.append(Ratio("layout of 2^20 ranks / import torch, whole processes", *measured))
    measured = pairs(lambda: process(*_LAYOUT), lambda: process("-c", _SCRIPT), number)
    rows.append(Ratio("layout of 2^20 ranks / init_device_mesh, whole processes", *measured, 0.05))
    return Findings(rows)


if __name__ == "__main__":
    report(main())
