"""Run suites that use the pytest plugin, as users run them: a pytest in a process of its own."""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from pathlib import Path

import pytest

from launch import clean_environment

#: Seconds that a busy machine may add to any bound.
SLACK = 6.0

IMPORTS = """
import os, signal, sys, threading, time
import pytest, torch
import torch.distributed as dist
"""


class Run:
    """A pytest that has ended: what it said, and how many of what."""

    def __init__(self, result: pytest.RunResult) -> None:
        self.result = result
        self.text = str(result.stdout) + str(result.stderr)
        self.outcomes = result.parseoutcomes()
        self.outcomes.pop("warnings", None)

    def about(self, name: str) -> str:
        """The report of one test."""
        head = rf"^_+ (?:ERROR at \w+ of )?{re.escape(name)}(?:\[.*?\])? _+$"
        found = re.search(rf"{head}(.*?)(?=^[_=]{{2}}.*[_=]{{2}}$|\Z)", self.text, re.M | re.S)
        assert found, f"no report of {name} in\n{self.text}"
        return found[1]

    def row(self, name: str, number: int) -> str:
        """A row of the table in the report of one test."""
        table = re.search(r"^-+ ranks -+$(.*?)^-+ ", self.about(name), re.MULTILINE | re.DOTALL)
        assert table, self.about(name)
        return table[1].strip().splitlines()[number]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run a suite; afterwards none of its processes may be left."""
    mark = uuid.uuid4().hex
    for name, value in clean_environment({"DISTCTX_MARK": mark}).items():
        monkeypatch.setenv(name, value)

    def run(
        source: str,
        *arguments: str,
        python: tuple[str, ...] = ("-m", "pytest"),
        off: tuple[str, ...] = ("randomly", "cacheprovider"),
        timeout: float = 110,
    ) -> Run:
        pytester.makepyfile(test_it=IMPORTS + source)
        options = [word for plugin in off for word in ("-p", f"no:{plugin}")]
        result = pytester.run(sys.executable, *python, *options, *arguments, timeout=timeout)
        assert processes_of(mark) == []
        return Run(result)

    return run


def processes_of(mark: str, patience: float = 5.0) -> list[str]:
    """The processes that have ``mark`` in their environment, and do not end in a while."""
    end = time.monotonic() + patience
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    mark.encode() in (path / "environ").read_bytes()
                    and int(path.name) != os.getpid()
                ):
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append(f"{path.name}: {command}")
            except OSError:  # it has ended, or is not ours
                continue
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.05)
