"""What one rank of a test does: run the test as pytest would, and tell what became of it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import pytest

from distctx import debug
from distctx.launchers import known_variables
from distctx.testing import RANK, _pytest
from distctx.testing.guards import Before
from distctx.testing.journal import Folder, Journal

if TYPE_CHECKING:
    from distctx.testing.marker import Ask

__all__ = [
    "LOOPBACK",
    "ONE_THREAD",
    "STACKS",
    "Rank",
    "Teller",
    "clocks_run",
    "die_with_parent",
    "is_debugged",
    "item_of",
    "kill_group",
    "one_thread",
    "run_here",
    "skip_without_gpus",
    "task_for",
]

#: Asks a rank for its stacks; not one that a test is likely to use.
STACKS: int = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR1

#: Tells libraries that compute to do so in one thread.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

#: The one interface that gloo listens on, as far as nobody says otherwise.
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

_PR_SET_PDEATHSIG = 1


def task_for(item: pytest.Item, ask: Ask, folder: Path, own: Path, port: int) -> dict[str, Any]:
    """All that a rank process must know, as JSON.

    Args:
        folder: where ranks tell how they fare.
        own: where the folders stand that the test sees.
        port: a port that is free.
    """
    environ = {
        "WORLD_SIZE": str(ask.world_size),
        "LOCAL_WORLD_SIZE": str(ask.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
    }
    environ |= ONE_THREAD
    if ask.detail:
        environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return {
        "nodeid": item.nodeid,
        "folder": str(folder),
        "own": str(own),
        "environ": environ,
        "backend": ask.backend,
        "world_size": ask.world_size,
        "guards": ask.guards,
    }


class Teller:
    """The plugin of one rank while it runs a test; tells of it by ``tell(event, **what)``.

    It is registered as ``RANK``, where the fixtures find it.
    """

    def __init__(
        self, config: pytest.Config, tell: Callable[..., None], backend: str, world_size: int
    ) -> None:
        self.config, self.tell = config, tell
        self.backend, self.world_size = backend, world_size
        self.inside = False
        self.failed = False
        self.failed_parts = 0
        #: How a runtime of this rank finds the others, beyond what the environment says.
        self.meeting: dict[str, Any] = {}
        #: The folder that all ranks share.
        self.shared: Path | None = None

    def run(self, item: pytest.Item) -> None:
        """Run the test, and log nothing here: its reports are told as they are made."""
        try:
            _pytest.run_item(item)
        except pytest.exit.Exception as stop:
            self.tell("stop", interrupt=False, text=str(stop), returncode=stop.returncode)
        except KeyboardInterrupt as stop:
            self.tell("stop", interrupt=True, text=str(stop), returncode=None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Skip what this machine lacks the GPUs for."""
        if self.backend == "nccl":
            skip_without_gpus(self.world_size)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Each report, as it is after every plugin has seen it."""
        report = yield
        if self.inside:  # of a part of the test, a subtest; see pytest_runtest_logreport
            return report
        if report.when == "call" and report.passed and self.failed_parts:
            parts = "subtest" if self.failed_parts == 1 else "subtests"  # as pytest does on show
            report.outcome, report.longrepr = (
                "failed",
                f"contains {self.failed_parts} failed {parts}",
            )
        self.failed = self.failed or report.failed
        as_json = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.tell(
            "report",
            when=report.when,
            outcome=report.outcome,
            failed=report.failed,
            xfail=hasattr(report, "wasxfail"),
            raised=type(call.excinfo.value).__name__ if call.excinfo else None,
            report=as_json,
        )
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        """While the test itself runs."""
        self.inside = True
        try:
            return (yield)
        finally:
            self.inside = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A report that the test logs itself: the phases' reports are not logged here."""
        if self.inside:
            hook = self.config.hook.pytest_report_to_serializable
            self.tell("subtest", report=hook(config=self.config, report=report))
            self.failed_parts += report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self) -> tuple[str, str, str] | None:
        """Nothing of this rank alone goes to the terminal."""
        return ("", "", "") if self.inside else None

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str) -> None:
        """A warning belongs to the summary of the whole run."""
        category = warning_message.category
        self.tell(
            "warning",
            text=str(warning_message.message),
            category=[category.__module__, category.__qualname__],
            filename=warning_message.filename,
            lineno=warning_message.lineno,
        )


class Rank(Teller):
    """The plugin of a process that is one rank of one test, and nothing else."""

    def __init__(self, config: pytest.Config, task: Mapping[str, Any], rank: int) -> None:
        self.folder = Folder(Path(task["folder"]))
        journal = Journal(self.folder.journal(rank))
        super().__init__(config, journal.tell, task["backend"], task["world_size"])
        place = self.folder.path.absolute() / "store"
        self.meeting = {
            "rank": rank,
            "world_size": self.world_size,
            "init_method": f"file://{place}",
        }
        self.shared = Path(task["own"]) / "shared"
        self.shared.mkdir(exist_ok=True)
        self._prompt = _Turn(self.folder.path / "prompt")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """In place of pytest's own, which logs reports here."""
        self.run(item)
        return True

    def announce(self, text: str) -> None:
        """A breakpoint of distctx's: the clocks stop, and the terminal says how to attach."""
        self.tell("debugger")
        with _pytest.capture_off(self.config):
            print(f"\n{text}", file=sys.stderr, flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_enter_pdb(self) -> None:
        """Somebody looks: the clocks stop, and this rank has the terminal, when it is its turn."""
        self.tell("debugger")
        self._prompt.take()
        _take_terminal(os.getpgrp())

    @pytest.hookimpl(trylast=True)
    def pytest_leave_pdb(self) -> None:
        """The terminal goes back to pytest, and the turn to another rank."""
        _take_terminal(os.getpgid(os.getppid()))
        self._prompt.leave()

    @pytest.hookimpl(tryfirst=True)
    def pytest_exception_interact(self, report: Any) -> None:
        """One rank at a time shows its failure and prompts."""
        if self.config.getoption("usepdb", False) and isinstance(report, pytest.TestReport):
            self._prompt.take()  # for the rest of this process


class _Turn:
    """The right to speak on the terminal, which one rank has at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Wait for it, as long as somebody else debugs."""
        import fcntl

        if self._file is None:
            self._file = self._path.open("w")
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def leave(self) -> None:
        """Pass it on."""
        if self._file is not None:
            self._file.close()
            self._file = None


def run_here(
    config: pytest.Config, item: pytest.Item, task: Mapping[str, Any], rank: int
) -> NoReturn:
    """Be this rank of this test; the process ends here."""
    os.environ.update(environment_of(os.environ, task, rank))
    for name in set(known_variables()) - set(task["environ"]) - _OF_ONE_RANK:
        os.environ.pop(name, None)
    me = Rank(config, task, rank)
    with me.folder.stacks(rank).open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(STACKS, stacks, all_threads=True)
        _pytest.set_base_folder(config, Path(task["own"]) / f"rank-{rank}")
        _leave_timeouts_outside(config, item)
        _silence_xdist(config)
        config.pluginmanager.register(me, RANK)
        debug.announce = me.announce
        one_thread()
        before = Before()
        me.tell("start", pid=os.getpid())
        if is_debugged():
            me.tell("debugger")
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        left = before.what_is_left() if task["guards"] and not me.failed else []
        me.tell("end", left=left)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)


_OF_ONE_RANK = frozenset({"RANK", "LOCAL_RANK"})


def environment_of(
    environ: Mapping[str, str], task: Mapping[str, Any], rank: int
) -> dict[str, str]:
    """The variables of this rank, the user's own choice of an interface among them."""
    ours = dict(task["environ"])
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        ours[name] = environ.get(name, ours[name])
    return ours | {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def one_thread() -> None:
    """Torch computes in one thread, and obeys the variable for its checks as it is now.

    One thread is also what makes a fork clean: a child whose parent has computed in several waits
    for ever for threads that it does not have (12 of 12, and 0 of 12 with one).
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        if torch.distributed.is_available():
            torch.distributed.set_debug_level_from_env()


def clocks_run(config: pytest.Config) -> bool:
    """Whether tests have bounds: not where somebody debugs."""
    option = config.getoption
    return not (option("usepdb", False) or option("trace", False) or is_debugged())


def is_debugged() -> bool:
    """Whether a debugger is attached to this process; one that measures coverage is none."""
    if "pydevd" in sys.modules or "debugpy" in sys.modules:
        return True
    trace = getattr(sys.gettrace(), "__self__", sys.gettrace())
    return trace is not None and not type(trace).__module__.startswith("coverage")


def skip_without_gpus(needed: int) -> None:
    """Skip a test of nccl where the machine has fewer GPUs than ranks."""
    import torch

    have = torch.cuda.device_count()
    if have < needed:
        gpus = "GPU" if needed == 1 else "GPUs"
        pytest.skip(f"needs {needed} {gpus}, have {have}")


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> bool:
    """From now on this process gets a signal when its parent ends; False where it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def kill_group(pid: int) -> None:
    """Kill what stands in the process group that a rank leads, if there is one still."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _leave_timeouts_outside(config: pytest.Config, item: pytest.Item) -> None:
    """pytest-timeout watches in the process that collected, over all ranks at once; here only where
    it is to watch the function alone, which runs nowhere else."""
    timeouts = config.pluginmanager.getplugin("timeout")
    mark = item.get_closest_marker("timeout")
    alone = mark is not None and mark.kwargs.get("func_only")
    if timeouts is not None and not (alone or config.getini("timeout_func_only")):
        config.pluginmanager.unregister(timeouts)


def _silence_xdist(config: pytest.Config) -> None:
    """The process that is worker to pytest-xdist speaks with it; its ranks must not."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__module__ == "xdist.remote":
            config.pluginmanager.unregister(plugin)


def _take_terminal(group: int) -> None:
    """Give the terminal to a process group, so that it reads what is typed."""
    with contextlib.suppress(OSError, ValueError):
        terminal = os.open("/dev/tty", os.O_RDWR)
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
        try:
            os.tcsetpgrp(terminal, group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            os.close(terminal)


def item_of(nodeid: str, items: Sequence[pytest.Item]) -> pytest.Item | None:
    """The item of this id."""
    return next((item for item in items if item.nodeid == nodeid), None)
