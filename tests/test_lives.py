"""Life after life, restarts, and jobs that fail: each a whole job of real processes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from benchmarks import bench_soak
from launch import run, torchrun


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("lives", "ranks"), [(1000, 1), (200, 4)])
def test_lives_leave_nothing(monkeypatch, lives, ranks):
    """Two hundred lives on four ranks of one job, and a thousand on one, with meshes of changing
    shapes and random pauses, all pass; threads, descriptors, groups, hook and environment are as
    they were, and memory is flat."""
    monkeypatch.chdir(Path(bench_soak.__file__).parents[1])
    for told in bench_soak.run(lives, ranks):
        assert told["failures"] == []
        early, late = told["early"], told["late"]
        # bare torch itself keeps about 700 bytes a life
        assert late.pop("memory") - early.pop("memory") < 4096 * lives
        assert late == early
        assert not late["excepthook"]
        assert not late["environ"]
        assert late["groups"] == 0


RESTARTED = """
import os, signal, sys, time
import torch, torch.distributed as dist
from distctx import DistributedRuntime

with DistributedRuntime(timeout=60):
    pass
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt == 0 and rank == 1:
    time.sleep(0.5)  # the others have arrived for the next life, and are killed in its room
    os.kill(os.getpid(), signal.SIGKILL)
with DistributedRuntime(timeout=60) as rt:
    total = torch.tensor([rank])
    dist.all_reduce(total, group=rt.group("dp"))
    print(f"attempt {attempt} total {total.item()}", flush=True)
"""


def test_a_restart_comes_up_on_old_keys(tmp_path):
    """A job that torchrun starts again comes up on a store with a half-full room of the last
    attempt."""
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    command = torchrun("--max-restarts=1", str(script), nproc=4)
    done = run(*command, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 1 total 6") == 4


FAILING = """
import os, signal, sys, time
from bdb import BdbQuit
import torch, torch.distributed as dist
from distctx import DistributedRuntime

def refuse(*_, **__):
    raise AssertionError("somebody waits on the way out")

with DistributedRuntime(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"), timeout=600) as rt:
    total = torch.tensor([rt.rank])
    dist.all_reduce(total, group=rt.group("tp"))
    dist.barrier()
    if rt.rank == 2:
        print("up", time.time(), flush=True)
        dist.barrier = dist.all_reduce = refuse
        FAULT
    dist.all_reduce(total)
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise KeyError('the body')", "KeyError: 'the body'"),
        ("sys.exit(3)", "ChildFailedError"),  # torchrun names whom it sees end first
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", "KeyboardInterrupt"),
        ("raise BdbQuit", "BdbQuit"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "Signal 9 (SIGKILL)"),
    ],
    ids=["raise", "sys.exit", "Ctrl-C", "BdbQuit", "SIGKILL"],
)
def test_one_failure_ends_the_job(tmp_path, fault, said):
    """Under torchrun the failure of one rank, while the others are in a collective, ends the job
    non-zero within seconds, whatever the group's timeout, and the failure is what is seen."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING.replace("FAULT", fault))
    done = run(*torchrun(str(script), nproc=4), timeout=100)
    ended = time.time()
    up = float(done.stdout.split()[1])
    assert done.returncode != 0
    assert ended - up < 20
    assert said in done.stderr
    assert "somebody waits" not in done.stderr
    if "raise" in fault:
        assert "[distctx] rank 2/4 at (dp=1, tp=0)" in done.stderr
        assert f") failed first: {said.rstrip(':')}" in done.stderr
    if "SIGKILL" in fault:
        # torchrun ends the others while they ask; what they met is in the log by then.
        assert "asks for at most 2 s which rank is at fault" in done.stderr
        assert re.search(r"RuntimeError: .*(onnection closed|onnection reset)", done.stderr)
