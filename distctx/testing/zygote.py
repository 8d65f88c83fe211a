"""The ranks of each test, out of a process that was forked after collection: in milliseconds."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from distctx.testing import _pytest
from distctx.testing.nursery import Nursery, fork
from distctx.testing.rank import STACKS

__all__ = ["Exit", "Zygote", "why_not_fork"]

#: Seconds within which the zygote answers.
_ANSWER = 60.0


class Exit(NamedTuple):
    """One rank that has ended."""

    rank: int
    #: The exit status; negative: the signal that killed it.
    status: int
    at: float


def why_not_fork() -> str | None:
    """What in this process makes a clean fork impossible, in words, or None."""
    if sys.platform != "linux":
        return f"forking is not safe on {sys.platform}"
    torch = sys.modules.get("torch")
    if torch is not None:
        for kind in ("cuda", "xpu"):
            if getattr(torch, kind).is_initialized():
                return f"{kind.upper()} is initialised in this process"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "this process has a process group"
    others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    others += _named_threads()
    if others:
        return f"this process has other threads: {', '.join(sorted(set(others)))}"
    if threading.current_thread() is not threading.main_thread():
        return "pytest does not run in the main thread"
    return None


def _named_threads() -> list[str]:
    """Native threads with a name of their own.

    These serve something, as torch's store server does. Pools for computing, whose children may be
    forked from as long as they compute in one thread, bear the name of their process.
    """
    known = {str(thread.native_id) for thread in threading.enumerate()}
    names = {}
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names[path.parent.name] = path.read_text().strip()
    mine = names.get(str(os.getpid()))
    return [name for thread, name in names.items() if thread not in known and name != mine]


class Zygote:
    """The side of the process that runs the tests.

    Args:
        config: of this run; its captured output is kept apart from the ranks'.
        run: what a rank does with a task and its rank; must not return.
    """

    def __init__(
        self, config: pytest.Config, run: Callable[[Mapping[str, Any], int], NoReturn]
    ) -> None:
        self._socket, theirs = socket.socketpair()
        self._unread = b""
        self._number = 0
        #: Seconds in which ranks begin: the first wait until torch is imported.
        self.start_bound = 60.0
        self.is_gone = False
        with _nothing_captured(config):
            parent = os.getpid()
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = fork()
            if self.pid == 0:
                self._socket.close()
                Nursery(config, theirs, parent, run).serve()
            theirs.close()
            wrong = self._line(_ANSWER)
        if wrong != "":
            self.close()
            raise ChildProcessError(wrong or "the process that was to fork ranks does not answer")

    def start(self, task: Mapping[str, Any]) -> None:
        """Fork the ranks of a task.

        Raises:
            ChildProcessError: the zygote has ended.
        """
        self._number += 1
        self.start_bound = 60.0 if self._number == 1 else 20.0
        self._ask({"start": task, "number": self._number})

    def exits(self, seconds: float) -> list[Exit]:
        """The ranks that have ended, waiting up to ``seconds`` for the first.

        Raises:
            ChildProcessError: the zygote has ended, and the ranks with it.
        """
        line = self._line(seconds)
        if line is None or line[0] != self._number:  # of a test before, whose rank would not die
            return []
        return [Exit(*line[1:])]

    def ask_for_stacks(self) -> None:
        """Every rank that lives writes down where it stands."""
        self._ask({"signal": STACKS})

    def kill(self) -> None:
        """Kill every rank that lives, and all that it started."""
        self._ask({"signal": int(signal.SIGKILL)})

    def close(self) -> None:
        """End the zygote, and with it all ranks."""
        self._socket.close()
        end = time.monotonic() + 5
        # Unless somebody else has waited for it.
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > end:
                    os.kill(self.pid, signal.SIGKILL)
                time.sleep(0.002)

    def _ask(self, request: Mapping[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            self._gone()

    def _line(self, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = max(0.0, end - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return None
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                self._gone()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _gone(self) -> NoReturn:
        self.is_gone = True
        raise ChildProcessError("the process that forks ranks has ended")


@contextlib.contextmanager
def _nothing_captured(config: pytest.Config) -> Any:
    """Fork while no captured output waits: a child that reads it would take it from its parent."""
    manager = _pytest.capture(config)
    if manager is None or not manager.is_globally_capturing():
        yield
        return
    waiting = manager.read_global_capture()
    try:
        yield
    finally:
        if waiting.out or waiting.err:
            manager.resume_global_capture()
            sys.stdout.write(waiting.out)
            sys.stderr.write(waiting.err)
            manager.suspend_global_capture()
