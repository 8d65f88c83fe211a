"""Ranks where forking is not safe: for each a fresh pytest, which collects again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from distctx.testing import TASK
from distctx.testing.journal import Folder, Journal
from distctx.testing.rank import ONE_THREAD, STACKS, die_with_parent, item_of, kill_group, run_here
from distctx.testing.zygote import Exit

__all__ = ["Fresh", "FreshRank"]

#: By which a process that a rank started, and left, is known.
MARK = "_DISTCTX_TEST"

#: Sees the modules that its maker sees, whichever way that one was started.
_PROGRAM = f"""
import json, os, sys
sys.path[:] = json.load(open(os.environ["{TASK}"].rsplit(":", 2)[0]))["path"]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


class Fresh:
    """Starts ranks as ``Zygote`` does, in a second or more each."""

    start_bound = 120.0

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._mark = ""

    def start(self, task: Mapping[str, Any]) -> None:
        """Start the ranks of a task."""
        folder = Folder(Path(task["folder"]))
        file = folder.path / "task.json"
        file.write_text(json.dumps(dict(task) | {"path": sys.path}))
        option = self._config.getoption
        aloud = option("usepdb", False) or option("capture", "fd") == "no"
        self._mark = str(folder.path)
        environ = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        environ |= ONE_THREAD
        self._ranks.clear()  # one of a test before would not die
        for rank in range(task["world_size"]):
            with contextlib.ExitStack() as files:
                streams = [
                    None if aloud else files.enter_context(folder.output(rank, name).open("wb"))
                    for name in ("stdout", "stderr")
                ]
                self._ranks[rank] = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, *_arguments(self._config)],
                    stdout=streams[0],
                    stderr=streams[1],
                    env=environ | {TASK: f"{file}:{rank}:{os.getpid()}", MARK: self._mark},
                    cwd=self._config.invocation_params.dir,
                    process_group=0,
                )

    def exits(self, seconds: float) -> list[Exit]:
        """The ranks that have ended, waiting up to ``seconds`` for the first."""
        end = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            found = [
                Exit(rank, process.returncode, now)
                for rank, process in self._ranks.items()
                if process.poll() is not None
            ]
            for exit in found:
                kill_group(self._ranks.pop(exit.rank).pid)
            if found and not self._ranks:
                self._kill_strays()
            if found or now >= end:
                return found
            time.sleep(0.01)

    def ask_for_stacks(self) -> None:
        """Every rank that lives writes down where it stands."""
        for process in self._ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, STACKS)

    def kill(self) -> None:
        """Kill every rank that lives, and what it started."""
        for process in self._ranks.values():
            kill_group(process.pid)

    def close(self) -> None:
        """Kill them, and wait until they are gone."""
        self.kill()
        for process in self._ranks.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        self._ranks.clear()
        self._kill_strays()

    def _kill_strays(self) -> None:
        """End what a test put into a session of its own: by a variable that it inherited."""
        if not self._mark:
            return
        mark = f"{MARK}={self._mark}\0".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is not ours
                if mark in path.read_bytes() + b"\0":
                    os.kill(int(path.parent.name), signal.SIGKILL)


def _arguments(config: pytest.Config) -> list[str]:
    """The arguments of this run, but for those by which it would start workers or measure again."""
    worker = getattr(config, "workerinput", None)
    given = worker["mainargv"][1:] if worker else list(config.invocation_params.args)
    off = ["-n0"] if config.pluginmanager.hasplugin("xdist") else []
    off += ["--no-cov"] if config.pluginmanager.hasplugin("_cov") else []
    if isinstance(seed := config.getoption("randomly_seed", None), int):
        off.append(f"--randomly-seed={seed}")
    return [*map(str, given), *off, "-o", "log_file_mode=a"]


class FreshRank:
    """The plugin of such a pytest: runs the one test, as one rank, and ends."""

    def __init__(self, config: pytest.Config, named: str) -> None:
        file, rank, parent = named.rsplit(":", 2)
        if not die_with_parent(int(parent)):
            os._exit(1)
        self.config, self.rank = config, int(rank)
        self.task = json.loads(Path(file).read_text())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> NoReturn:
        """In place of all tests, the one."""
        nodeid = self.task["nodeid"]
        item = item_of(nodeid, session.items)
        if item is None:
            journal = Journal(Folder(Path(self.task["folder"])).journal(self.rank))
            journal.tell("absent", text=f"a fresh pytest did not collect {nodeid} again")
            os._exit(1)
        run_here(self.config, item, self.task, self.rank)
