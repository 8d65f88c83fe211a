"""Jobs of ranks that are started by hand, so that nothing but distctx looks after them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from distctx.debug import RankHere, ranks_here
from launch import clean_environment, without_gloo

HEAD = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
from distctx import DistributedRuntime, _torch

rank, world_size, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
with DistributedRuntime(
    "gloo", "file://" + sys.argv[4], rank, world_size,
    mesh_shape=(-1, 1), mesh_dim_names=("dp", "tp"), timeout=timeout, rendezvous_timeout=60,
) as rt:
"""


class Ended(NamedTuple):
    """What a rank left."""

    status: int
    out: str
    err: str


class Terminal:
    """``attach`` that stays, fed and read over pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.said = process, ""

    def until(self, text: str) -> bool:
        """Read until it has said this."""
        assert self.process.stdout is not None
        while text not in self.said:
            if not (more := self.process.stdout.read(1)):
                return False
            self.said += more
        return True


class Job:
    """Some ranks of one program, each with its output in files."""

    def __init__(self, folder: Path, ranks: int, body: str, timeout: float, after: str) -> None:
        self.folder, self.names = folder, folder / "n"
        self.script = folder / "body.py"
        self.script.write_text(
            HEAD + "".join(f"    {line}\n" for line in body.splitlines()) + after
        )
        self.environ = clean_environment({"DISTCTX_DIR": str(self.names)})
        self.processes = [self._start(rank, ranks, timeout) for rank in range(ranks)]

    def _start(self, rank: int, ranks: int, timeout: float) -> subprocess.Popen[bytes]:
        own = [str(rank), str(ranks), str(timeout), str(self.folder / "store")]
        with (
            (self.folder / f"{rank}.out").open("w") as out,
            (self.folder / f"{rank}.err").open("w") as err,
        ):
            return subprocess.Popen(
                [sys.executable, str(self.script), *own],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=self.environ, start_new_session=True,
            )  # fmt: skip

    def line_of(self, text: str) -> int:
        """The number of the line that holds this."""
        lines = self.script.read_text().splitlines()
        return next(number for number, line in enumerate(lines, 1) if text in line)

    def output(self, rank: int, stream: str) -> str:
        """What a rank has said so far."""
        return without_gloo((self.folder / f"{rank}.{stream}").read_text())

    def _until(self, is_so: Callable[[], bool], what: str, within: float = 60) -> None:
        end = time.monotonic() + within
        while not is_so():
            if time.monotonic() > end or all(p.poll() is not None for p in self.processes):
                said = "\n".join(self.output(r, "err") for r in range(len(self.processes)))
                pytest.fail(f"{what}: not within {within:g} s; the ranks said:\n{said}")
            time.sleep(0.05)

    def stopped(self) -> dict[int, RankHere]:
        """The ranks that are stopped."""
        here = ranks_here(self.names)
        return {rank.rank: rank for rank in here if rank.stopped and rank.socket.exists()}

    def wait_stopped(self, *ranks: int, line: int | None = None) -> None:
        """Until just these are stopped, at a line."""

        def are() -> bool:
            found = self.stopped()
            at = {place.line for one in found.values() if (place := one.stopped)}
            return set(found) == set(ranks) and (line is None or at == {line})

        self._until(are, f"ranks {ranks} stop")

    def says(self, rank: int, text: str) -> bool:
        """Wait until a rank has said this."""
        self._until(lambda: text in self.output(rank, "out"), f"rank {rank} says {text!r}")
        return True

    def run(self, *command: str, lines: str = "") -> subprocess.CompletedProcess[str]:
        """``python -m distctx COMMAND`` in another process, with these lines typed."""
        return subprocess.run(
            [sys.executable, "-m", "distctx", *command],
            input=lines, env=self.environ, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def attach(self, *command: str, lines: str = "") -> subprocess.CompletedProcess[str]:
        """``python -m distctx attach``."""
        return self.run("attach", *command, lines=lines)

    @contextlib.contextmanager
    def attached(self, *command: str) -> Iterator[Terminal]:
        """``python -m distctx attach`` while the block runs."""
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "distctx", "attach", *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environ,
        )  # fmt: skip
        try:
            yield Terminal(process)
        finally:
            process.kill()
            process.communicate()

    def ended(self, within: float = 40) -> list[Ended]:
        """All ranks, when they have ended."""
        end = time.monotonic() + within
        for process in self.processes:
            process.wait(max(0.1, end - time.monotonic()))
        return [
            Ended(process.returncode, self.output(rank, "out"), self.output(rank, "err"))
            for rank, process in enumerate(self.processes)
        ]

    def kill(self) -> None:
        """The end of it."""
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    """Start ranks of a program whose body runs in an open runtime ``rt``, and what comes after."""
    made: list[Job] = []
    with tempfile.TemporaryDirectory(prefix="dx-") as folder:  # a short path, as a socket needs

        def start(ranks: int, body: str, timeout: float = 30, after: str = "") -> Job:
            path = Path(folder) / str(len(made))
            path.mkdir()
            made.append(Job(path, ranks, body, timeout, after))
            return made[-1]

        try:
            yield start
        finally:
            for one in made:
                one.kill()
