"""What a test must not leave behind: a process group, a variable, a hook, a thread, a child."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

__all__ = ["Before", "children", "left_group"]

#: Seconds in which threads and children that are ending may end.
_PATIENCE = 1.0

#: What goes on by right, whoever started it: helpers that live as long as their process.
_LASTING_THREADS = ("TMonitor", "pydevd", "distctx-")
_LASTING_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "_inductor")

#: Written anew for each test by pytest; the others by torch while it starts, once a process.
_LASTING_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_", "CUDA_MODULE_LOADING")


@attrs.frozen
class Before:
    """How the process was before the test."""

    environment: Mapping[str, str] = attrs.field(factory=lambda: dict(os.environ))
    hook: Any = attrs.field(factory=lambda: sys.excepthook)
    threads: frozenset[threading.Thread] = attrs.field(
        factory=lambda: frozenset(threading.enumerate())
    )
    children: frozenset[int] = attrs.field(factory=lambda: frozenset(children()))

    def what_is_left(self) -> list[str]:
        """What the test left behind, in words; waits a little for what is ending."""
        found = [] if (group := left_group()) is None else [group]
        if sys.excepthook is not self.hook and not _is_torchs(sys.excepthook):
            found.append(f"another sys.excepthook ({sys.excepthook!r})")
        found += self._variables()
        end = time.monotonic() + _PATIENCE
        while (running := self._threads() + self._children()) and time.monotonic() < end:
            time.sleep(0.01)
        return found + running

    def _variables(self) -> list[str]:
        now, then = os.environ, self.environment
        names = [name for name in {*now, *then} if not name.startswith(_LASTING_VARIABLES)]
        left = []
        for name in sorted(names):
            if name not in then:
                left.append(f"the environment variable {name}={now[name]!r}")
            elif name not in now:
                left.append(f"no environment variable {name}, which was there")
            elif now[name] != then[name]:
                left.append(
                    f"the environment variable {name}={now[name]!r}, which was {then[name]!r}"
                )
        return left

    def _threads(self) -> list[str]:
        return [
            f"a thread, {thread.name!r}"
            for thread in threading.enumerate()
            if thread not in self.threads
            and not thread.name.startswith(_LASTING_THREADS)
            and not isinstance(thread, threading._DummyThread)
        ]

    def _children(self) -> list[str]:
        left = []
        for pid in sorted(set(children()) - self.children):
            command = _command(pid)
            if command is not None and not any(name in command for name in _LASTING_CHILDREN):
                left.append(f"a child process, pid {pid} ({command or 'not waited for'})")
        return left


def _is_torchs(hook: Any) -> bool:
    """Whether torch put it there: starting a group does, and no end of it takes it away."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def left_group() -> str | None:
    """The process group that is there, in words, or None."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return f"a process group ({dist.get_backend()}, {dist.get_world_size()} ranks)"


def children() -> list[int]:
    """The pids of this process's children; none where the system does not say."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            found += [int(pid) for pid in path.read_text().split()]
        except OSError:  # the thread has ended
            continue
    return found


def _command(pid: int) -> str | None:
    """The command line of a process; empty for one that ended, None for one that is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return b" ".join(words).decode(errors="replace").strip()
