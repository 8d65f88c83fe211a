"""The process that forks the ranks of each test, and ends them.

It starts no thread and computes nothing, so that its forks are clean. It and its ranks end with
the process that made it, whichever way that ends; what a rank's test started ends with the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from distctx.testing import _pytest
from distctx.testing.guards import children
from distctx.testing.journal import Folder
from distctx.testing.rank import ONE_THREAD, die_with_parent, kill_group, one_thread

__all__ = ["Nursery", "fork"]

_PR_SET_CHILD_SUBREAPER = 36

#: The signals that end it, with all ranks.
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def _what_is_wrong_here() -> str:
    """What a child of this fork finds it cannot do, in words; empty where all is well."""
    if "torch" in sys.modules:
        from distctx import _torch

        if _torch.cuda_was_forked():
            return "CUDA was initialised, or asked whether it is available, in this process"
    return ""


def fork() -> int:
    """Fork, without the warning that some pool of threads is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class Nursery:
    """The zygote's own side.

    Args:
        config: of the run; its captured output is kept apart from the ranks'.
        parent: the way to the process that runs the tests.
        parent_pid: that process.
        run: what a rank does with a task and its rank; must not return.
    """

    def __init__(
        self,
        config: pytest.Config,
        parent: socket.socket,
        parent_pid: int,
        run: Callable[[Mapping[str, Any], int], NoReturn],
    ) -> None:
        self.config, self.parent, self.run = config, parent, run
        self.parent_pid = parent_pid
        # By pid: the number of the test, the rank, and a way to hear from it.
        self.ranks: dict[int, tuple[int, int, socket.socket]] = {}
        self.number = 0
        self.folder = Folder(Path())
        self.pid = 0
        self.signals = -1

    def serve(self) -> NoReturn:
        """Fork and reap until the parent ends."""
        try:
            self._prepare()
            self._tell(_what_is_wrong_here())
            self._warm_up()  # while the parent runs what comes before the first ranks
            self._hear_signals()
            self._serve()
        except BaseException:
            traceback.print_exc()  # on the terminal: the parent will say only that this one ended
        finally:
            try:
                self._kill()
            finally:
                os._exit(0)

    def _prepare(self) -> None:
        self.pid = os.getpid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's goes to the parent, who acts
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until there are ranks to be killed
        if not die_with_parent(self.parent_pid, signal.SIGTERM):
            os._exit(0)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if (manager := _pytest.capture(self.config)) is not None:
            manager.stop_global_capturing()

    def _hear_signals(self) -> None:
        """A child that ended, and SIGTERM, are words in a pipe: no handler interrupts anything."""
        self.signals, theirs = os.pipe()
        os.set_blocking(theirs, False)
        os.set_blocking(self.signals, False)
        for number in (signal.SIGCHLD, *_ENDS):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)

    def _warm_up(self) -> None:
        """What every rank would have to do, and what makes their forks light, done once."""
        os.environ.update(ONE_THREAD)
        with contextlib.suppress(ImportError):  # the test will say so
            import distctx.runtime
            import distctx.start  # noqa: F401
        one_thread()
        gc.collect()
        gc.freeze()  # so that a rank that collects copies none of it

    def _serve(self) -> None:
        unread = b""
        while True:
            ready, _, _ = select.select([self.parent.fileno(), self.signals], [], [])
            if self.signals in ready:
                if set(os.read(self.signals, 4096)) & set(_ENDS):
                    return
                self._reap()
            if self.parent.fileno() in ready:
                try:
                    data = self.parent.recv(65536)
                except ConnectionError:  # it was killed before it read all
                    return
                if not data:
                    return
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))

    def _obey(self, request: Mapping[str, Any]) -> None:
        if "start" in request:
            self.number = request["number"]
            self._start(request["start"])
            return
        for pid in self.ranks:
            if request["signal"] == signal.SIGKILL:
                kill_group(pid)
            else:
                os.kill(pid, request["signal"])

    def _start(self, task: Mapping[str, Any]) -> None:
        self.folder = Folder(Path(task["folder"]))
        for rank in range(task["world_size"]):
            mine, theirs = socket.socketpair()
            if (pid := fork()) == 0:
                mine.close()
                self._be(task, rank, theirs)
            theirs.close()
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self.ranks[pid] = self.number, rank, mine

    def _be(self, task: Mapping[str, Any], rank: int, way: socket.socket) -> NoReturn:
        """In the rank: a process group of its own, so that all it starts can be killed with it."""
        try:
            os.setpgid(0, 0)
            if not die_with_parent(self.pid):
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *_ENDS):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.parent.close()
            os.close(self.signals)
            for *_, other in self.ranks.values():
                other.close()
            if (manager := _pytest.capture(self.config)) is not None:
                manager.start_global_capturing()
                if self.config.getoption("capture", "fd") == "fd":
                    socket.send_fds(way, [b"1"], [1, 2])
            self.run(task, rank)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        """Tell the parent of those that ended; what they started ends too."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                return
            if ended is None:
                return
            at = time.monotonic()
            pid = ended.si_pid
            if pid in self.ranks:
                kill_group(pid)  # before it is reaped: until then the number is its own
            _, status = os.waitpid(pid, 0)
            if pid in self.ranks:
                number, rank, way = self.ranks.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                if number == self.number:
                    self._keep_output(rank, way)
                way.close()
                self._tell([number, rank, code, at])
            if not self.ranks:  # an orphan may come only when the one before it has gone
                self._kill_strays()

    def _tell(self, what: Any) -> None:
        with contextlib.suppress(ConnectionError):  # the parent has ended; that is seen elsewhere
            self.parent.sendall(json.dumps(what).encode() + b"\n")

    def _keep_output(self, rank: int, way: socket.socket) -> None:
        """What a rank had written since its last report, out of its open files: nothing, unless it
        crashed. None came where output is not captured in files, or it was killed at once."""
        way.setblocking(False)
        files: list[int] = []
        with contextlib.suppress(OSError):
            _, files, _, _ = socket.recv_fds(way, 1, 2)
        for stream, file in zip(("stdout", "stderr"), files, strict=False):
            if size := os.fstat(file).st_size:
                self.folder.output(rank, stream).write_bytes(os.pread(file, size, 0))
            os.close(file)

    def _kill_strays(self) -> None:
        """End the orphans that ranks left: as their subreaper, this process has become parent."""
        for pid in set(children()) - set(self.ranks):
            kill_group(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _kill(self) -> None:
        """All of them, and the orphans that each death may bring here."""
        end = time.monotonic() + 2
        self.ranks, ranks = {}, self.ranks
        for pid in ranks:
            kill_group(pid)
        while children() and time.monotonic() < end:
            self._kill_strays()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.002)
