"""From the start of a process to the end of its first collective: a script with distctx against
one with bare torch, with accelerate and with lightning-fabric.

No launcher, which would cost all alike: the ranks are started by hand, at once, with the variables
that torchrun sets. The slowest rank counts. Whoever is not installed is left out.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from benchmarks.common import PAIRS, Findings, Ratio, is_here, report, rounds

RANKS = (1, 2, 4, 8)

_DISTCTX = """
import torch, torch.distributed as dist
from distctx import DistributedRuntime
with DistributedRuntime() as rt:
    total = torch.ones(1)
    dist.all_reduce(total)
    done(total)
"""

_TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
done(total)
"""

_ACCELERATE = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
done(accelerator.reduce(torch.ones(1)))
"""

_FABRIC = """
import torch
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="STRATEGY")
fabric.launch()
done(fabric.all_reduce(torch.ones(1), reduce_op="sum"))
"""

#: What each script does with its first sum: say when that was, and wait until all have said it.
_DONE = """
import os, sys, time
def done(total):
    moment = time.monotonic()
    assert total.item() == int(os.environ["WORLD_SIZE"])
    os.write(FD, f"{moment}\\n".encode())
    sys.stdin.read()
    os._exit(0)
"""


def sides(ranks: int) -> dict[str, str]:
    """The scripts of those who are here."""
    found = {"distctx": _DISTCTX, "bare torch": _TORCH}
    if is_here("accelerate"):
        found["accelerate"] = _ACCELERATE
    for module in ("lightning_fabric", "lightning"):
        if is_here(module):
            fabric = _FABRIC.replace("STRATEGY", "ddp" if ranks > 1 else "auto")
            if module == "lightning_fabric":
                fabric = fabric.replace("lightning.fabric", module)
            found["lightning-fabric"] = fabric
            break
    return found


def start(script: str, ranks: int) -> float:
    """Seconds until the slowest of so many ranks has its first sum."""
    reading, writing = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code = _DONE.replace("FD", str(writing)) + script
    began = time.monotonic()
    processes = []
    for rank in range(ranks):
        environ = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
            "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
            "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {key: str(value) for key, value in environ.items()},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[writing],
        )
        processes.append(process)
    os.close(writing)
    with open(reading) as moments:
        ended = [float(moments.readline() or "nan") for _ in range(ranks)]
    for process in processes:
        _, said = process.communicate()
        if process.returncode:
            raise RuntimeError(f"a rank of {ranks} failed:\n{said.decode()}")
    return max(ended) - began


def main(number: int = PAIRS) -> Findings:
    """Every side once a round."""
    rows = []
    for ranks in RANKS:
        scripts = sides(ranks)
        took = rounds(
            {
                name: lambda code=code, ranks=ranks: start(code, ranks)
                for name, code in scripts.items()
            },
            number,
        )
        ours = took.pop("distctx")
        for name, theirs in took.items():
            bound = 1.05 if name == "bare torch" else 1.0
            question = f"process start to first sum, {ranks} rank{'s' * (ranks > 1)} / {name}"
            rows.append(Ratio(question, ours, theirs, bound))
    return Findings(rows)


if __name__ == "__main__":
    report(main())
