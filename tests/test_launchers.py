"""Real launchers: what each rank knows of itself under them, and that the right ranks meet."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distctx import MeshLayout
from launch import clean_environment, lacks, torchrun, without_gloo

WHERE = """
import json, os, sys
import torch, torch.distributed as dist
from distctx import DistributedRuntime

with DistributedRuntime(
    mesh_shape=(-1, 2), mesh_dim_names=("dp", "tp"), timeout=30, rendezvous_timeout=30
) as rt:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    told = {"launcher": rt.environment.launcher, "attempt": attempt}
    for name in ("rank", "world_size", "local_rank", "local_world_size", "node_rank"):
        told[name] = getattr(rt.environment, name)
    told["sums"] = {}
    for name in ("dp", "tp"):
        total = torch.tensor(2**rt.rank)
        dist.all_reduce(total, group=rt.group(name))
        told["sums"][name] = total.item()
    if "fail" in sys.argv and told["attempt"] == "0":
        if rt.rank == 1:
            os._exit(1)
        dist.barrier()
    os.write(1, (json.dumps(told) + chr(10)).encode())  # at once, so that lines do not mix
"""


class Launch:
    """Launchers of one program, ended with all that they started when the test is over."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()
        self.script = folder / "where.py"
        self.script.write_text(WHERE)

    def start(self, *command: str) -> None:
        """Start a launcher, whose output goes to files."""
        with self._file("out").open("w") as out, self._file("err").open("w") as err:
            process = subprocess.Popen(
                command, env=clean_environment(), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            )  # fmt: skip
        self.processes.append(process)

    def told(self, within: float = 60) -> list[list[dict[str, Any]]]:
        """What the ranks of each launcher said, in the order of ranks, when all have ended well."""
        end = time.monotonic() + within
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(max(0.1, end - time.monotonic()))
        states = [process.poll() for process in self.processes]
        if any(state != 0 for state in states):
            said = "\n".join(self._file("err", n).read_text() for n in range(len(states)))
            pytest.fail(f"launchers ended with {states} (None: not within {within:g} s):\n{said}")
        outputs = [without_gloo(self._file("out", n).read_text()) for n in range(len(states))]
        lines = [[json.loads(line) for line in output.splitlines()] for output in outputs]
        return [sorted(ranks, key=lambda told: told["rank"]) for ranks in lines]

    def kill(self) -> None:
        """End the launchers and their ranks, which may be in sessions of their own: all that have
        the script in their command line."""
        name = os.fsencode(self.script)
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if name in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
        for process in self.processes:
            process.wait(10)

    def _file(self, ending: str, number: int | None = None) -> Path:
        number = len(self.processes) if number is None else number
        return self.folder / f"{number}.{ending}"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start launchers of the program above."""
    launch = Launch(tmp_path)
    yield launch
    launch.kill()


@pytest.fixture
def mpirun() -> Callable[..., list[str]]:
    """The command that starts ``python COMMAND…`` under Open MPI; skips where that is missing,
    and fails where all of it must be there."""
    version = ""
    if shutil.which("mpirun"):
        asked = ["mpirun", "--version"]
        version = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout
    if "Open MPI" not in version:
        lacks("the mpirun of Open MPI")
    options = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")

    def command(*command: str, n: int) -> list[str]:
        return ["mpirun", *options, "-n", str(n), sys.executable, *command]

    return command


def expected(launcher: str, world_size: int, local: int, attempt: str | None) -> list[Any]:
    """What each rank has to say on hosts of ``local`` ranks each."""
    layout = MeshLayout((-1, 2), ("dp", "tp")).resolve(world_size)
    return [
        {
            "launcher": launcher,
            "attempt": attempt,
            "rank": rank,
            "world_size": world_size,
            "local_rank": rank % local,
            "local_world_size": local,
            "node_rank": rank // local,
            "sums": {
                name: sum(2**peer for peer in layout.ranks(rank, name)) for name in ("dp", "tp")
            },
        }
        for rank in range(world_size)
    ]


def test_torchrun_of_two_agents(launch: Launch) -> None:
    """Two agents of two ranks each, as on two hosts, are one world whose ranks know their node."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
    for _ in range(2):
        launch.start(
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={place}", "--rdzv-id=x",
            "--local-addr=127.0.0.1", str(launch.script),
        )  # fmt: skip
    wanted = expected("torchrun", 4, local=2, attempt="0")
    agents = sorted(launch.told(), key=lambda ranks: ranks[0]["rank"])
    assert agents == [wanted[:2], wanted[2:]]


def test_torchrun_starts_again_after_a_death_in_the_body(launch: Launch) -> None:
    """Where a rank dies at once in an open runtime with its mesh built, torchrun's second try
    comes up."""
    options = torchrun("--max-restarts=1", str(launch.script), "fail", nproc=2)
    launch.start(sys.executable, *options)
    assert launch.told() == [expected("torchrun", 2, local=2, attempt="1")]


def test_mpirun(launch: Launch, mpirun: Callable[..., list[str]]) -> None:
    """Ranks that Open MPI's mpirun starts on one host meet without any address given."""
    launch.start(*mpirun(str(launch.script), n=4))
    assert launch.told() == [expected("openmpi", 4, local=4, attempt=None)]


def test_torchrun_inside_mpirun(launch: Launch, mpirun: Callable[..., list[str]]) -> None:
    """Of torchrun inside mpirun, torchrun is the one that decides."""
    launch.start(*mpirun(*torchrun(str(launch.script), nproc=2), n=1))
    assert launch.told() == [expected("torchrun", 2, local=2, attempt="0")]
