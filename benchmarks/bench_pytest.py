"""A four-rank test of the pytest plugin against torch's MultiProcessTestCase and mp.spawn by hand;
and what the plugin costs a run that does not use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import PAIRS, Findings, Ratio, is_here, pairs, report

_BODY = "total = torch.ones(1); dist.all_reduce(total); assert total.item() == 4"

#: Writes what each test takes, from its first word to its last, as its run sees it.
_CONFTEST = """
import json, os, time
began, took = {}, []
def pytest_runtest_logstart(nodeid):
    began[nodeid] = time.perf_counter()
def pytest_runtest_logfinish(nodeid):
    took.append(time.perf_counter() - began[nodeid])
def pytest_sessionfinish():
    with open(os.environ["TOOK"], "w") as file:
        json.dump(took, file)
"""

_PLUGIN = f"""
import pytest, torch
import torch.distributed as dist

@pytest.mark.distributed(4, timeout=60)
@pytest.mark.parametrize("number", range(20))
def test_it(distributed_runtime, number):
    {_BODY}
"""

_CASE = f"""
import os, unittest
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

class TestIt(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_it(self):
        store = dist.FileStore(self.file_name, 4)
        dist.init_process_group("gloo", rank=self.rank, world_size=4, store=store)
        {_BODY}
        dist.destroy_process_group()
"""

_SPAWN = f"""
import torch, torch.distributed as dist, torch.multiprocessing as mp

def rank(rank, path):
    dist.init_process_group("gloo", rank=rank, world_size=4, init_method=f"file://{{path}}")
    {_BODY}
    dist.destroy_process_group()

def test_it(tmp_path):
    mp.spawn(rank, (tmp_path / "store",), nprocs=4)
"""

_PLAIN = "def test_it(): pass\n"


def run(source: str, *arguments: str) -> tuple[float, list[float]]:
    """Seconds of a whole pytest, and of each of its tests."""
    with TemporaryDirectory() as folder:
        Path(folder, "conftest.py").write_text(_CONFTEST)
        Path(folder, "test_it.py").write_text(source)
        took = Path(folder, "took.json")
        start = time.perf_counter()
        options = ["-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, folder],
            env=os.environ | {"TOOK": str(took), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        whole = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return whole, json.loads(took.read_text())


def main(number: int = PAIRS) -> Findings:
    """Each side is a pytest of its own; of the plugin the 20th test counts, of the others the one
    they run, since each of theirs costs the same."""

    def twentieth() -> float:
        return run(_PLUGIN)[1][-1]

    others = {"mp.spawn by hand": _SPAWN}
    if is_here("expecttest"):  # which torch's case imports
        others["MultiProcessTestCase"] = _CASE
    rows = []
    for name, source in others.items():
        ours, theirs = pairs(twentieth, lambda source=source: run(source)[1][0], number)
        rows.append(Ratio(f"20th test of 4 ranks / {name}", ours, theirs, 0.05))
    ours, theirs = pairs(
        lambda: run(_PLAIN)[0], lambda: run(_PLAIN, "-p", "no:distctx")[0], 3 * number
    )
    rows.append(Ratio("a run without use / without plugin", ours, theirs))
    return Findings(rows)


if __name__ == "__main__":
    report(main())
