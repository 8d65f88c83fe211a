"""What one GPU can show of NCCL, in worlds of 1. Skipped where torch sees none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch import run, torchrun

pytestmark = pytest.mark.gpu

LIVES = """
import json
import torch
import torch.distributed as dist
from distctx import DistributedRuntime, _torch

bound, init = [], dist.init_process_group
aborted, abort = [], _torch.abort_world

def watched(**arguments):
    bound.append([torch.cuda.current_device(), str(arguments["device_id"])])
    init(**arguments)

def watched_abort():
    aborted.append(len(told))
    abort()

def life(fail=False):
    with DistributedRuntime(mesh_shape=(-1, 1), mesh_dim_names=("dp", "tp"), timeout=30) as rt:
        total = torch.ones(4, device=rt.device)
        dist.all_reduce(total, group=rt.group("dp"))
        told = {
            "backend": rt.backend, "device": str(rt.device), "mesh": rt.mesh.device_type,
            "group": dist.get_backend(rt.group("tp")), "total": total.tolist(),
        }
        if fail:
            torch.cuda._sleep(10**9)  # a kernel that runs while the group is aborted
            dist.all_reduce(total)
            raise KeyError("the fault")
    return told

dist.init_process_group = watched
_torch.abort_world = watched_abort
told = []
told.append(life())
try:
    life(fail=True)
except KeyError:
    left = dist.is_initialized()
told.append(life())
print(json.dumps({"lives": told, "bound": bound, "left": left, "aborted": aborted}))
"""


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    """Asked for in another process: who has asked torch must not fork ranks any more."""
    if run("-c", "import sys, torch; sys.exit(not torch.cuda.is_available())").returncode:
        pytest.skip("needs a GPU, and a torch for it")


@pytest.mark.parametrize("launcher", ["plain python", "torchrun"])
def test_lives_of_one(tmp_path: Path, launcher: str) -> None:
    """The device is bound before the group is made, NCCL is chosen, the mesh is on it; a life that
    an error ends is aborted, and the next one computes."""
    script = tmp_path / "lives.py"
    script.write_text(LIVES)
    command = [str(script)] if launcher == "plain python" else torchrun(str(script), nproc=1)
    done = run(*command, timeout=110)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["bound"] == [[0, "cuda:0"]] * 3
    assert not told["left"]
    assert told["aborted"] == [1]  # after the first life, and no other
    life = {"backend": "nccl", "device": "cuda:0", "mesh": "cuda", "group": "nccl"}
    assert told["lives"] == [life | {"total": [1.0] * 4}] * 2
