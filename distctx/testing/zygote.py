"""A process that was forked after collection and forks the ranks of each test, in milliseconds.

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
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from distctx.testing import _pytest
from distctx.testing.guards import children
from distctx.testing.journal import Folder
from distctx.testing.rank import ONE_THREAD, STACKS, die_with_parent, one_thread

__all__ = ["Exit", "Zygote", "why_not_fork"]

_PR_SET_CHILD_SUBREAPER = 36

#: The signals that end it, with all ranks.
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

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
                _Nursery(config, theirs, parent, run).serve()
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


class _Nursery:
    """The zygote's side."""

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
                self._kill_group(pid)
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
                self._kill_group(pid)  # before it is reaped: until then the number is its own
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
            self._kill_group(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _kill_group(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _kill(self) -> None:
        """All of them, and the orphans that each death may bring here."""
        end = time.monotonic() + 2
        self.ranks, ranks = {}, self.ranks
        for pid in ranks:
            self._kill_group(pid)
        while children() and time.monotonic() < end:
            self._kill_strays()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.002)
