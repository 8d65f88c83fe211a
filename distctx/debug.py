"""The door through which another terminal finds the ranks of this machine. No torch here.

A rank that opens a world leaves its name in a folder that only its user can enter, and answers one
signal by writing its stacks there; no thread waits for it, so a rank that hangs in a collective
answers too. At a breakpoint (``breakpoints.py``) it also listens on a socket beside its name.
``attach.py`` is the other side.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import logging
import os
import shlex
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import attrs

from distctx.environment import LaunchEnvironment
from distctx.exceptions import RuntimeStateError
from distctx.layout import MeshLayout

__all__ = [
    "ASKS_FOR_STACKS",
    "RankHere",
    "Stopped",
    "announce",
    "attach_command",
    "door",
    "folder",
    "is_alive",
    "is_near",
    "own_name",
    "ranks_here",
    "require_private",
    "when_begun",
]

log = logging.getLogger("distctx")

#: Asks a rank for its stacks. A process without a handler ignores this one, so that a question
#: that comes too late harms nobody.
ASKS_FOR_STACKS = signal.SIGURG


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


#: Says to the person at the job's own terminal that a rank stops, or quits. The pytest plugin,
#: which captures what a rank prints, puts its own here.
announce: Callable[[str], None] = _print


def folder() -> Path:
    """Where the ranks of this user leave their names: ``DISTCTX_DIR``, or a folder in /tmp."""
    return Path(os.environ.get("DISTCTX_DIR") or _usual_folder()).absolute()


def _usual_folder() -> Path:
    return Path(f"/tmp/distctx-{os.getuid()}")


def require_private(path: Path) -> None:
    """Refuse a folder that somebody else may enter, or has made.

    Raises:
        RuntimeStateError: it is not this user's alone.
    """
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise RuntimeStateError(
            f"{path} must be a folder of this user alone (mode 0700); remove it, or set "
            "DISTCTX_DIR to another one, for the ranks and for the terminal that looks."
        )


class Stopped(NamedTuple):
    """The line at which a rank is stopped."""

    file: str
    line: int
    function: str


class RankHere(NamedTuple):
    """A rank of this machine that left its name: a file whose first line it is.

    What stands below that line are its stacks, when it was asked for them.
    """

    path: Path
    pid: int
    began: str
    rank: int
    world_size: int
    where: str
    job: str
    program: str

    @property
    def socket(self) -> Path:
        """Where it listens while it is stopped, unless it has a terminal of its own."""
        return self.path.with_suffix(".socket")

    @property
    def stopped(self) -> Stopped | None:
        """Where it is stopped; None while it runs."""
        try:
            return Stopped(*json.loads(self._stopped.read_text()))
        except (OSError, ValueError):
            return None

    @property
    def _stopped(self) -> Path:
        return self.path.with_suffix(".stopped")

    def stop_at(self, place: Stopped) -> None:
        """Say where it is stopped, as long as it has a name."""
        if not self.path.exists():
            return
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(place))
        new.replace(self._stopped)

    def run_on(self) -> None:
        """It is stopped no longer."""
        self._stopped.unlink(missing_ok=True)

    def stacks(self) -> str:
        """What it wrote when it was asked; empty where it did not."""
        try:
            return self.path.read_text(errors="replace").partition("\n")[2]
        except OSError:
            return ""

    def ask_for_stacks(self) -> None:
        """Let it write them, in place of what stood there."""
        with contextlib.suppress(OSError):  # it has just ended
            with self.path.open("rb") as file:
                size = len(file.readline())
            os.truncate(self.path, size)
            os.kill(self.pid, ASKS_FOR_STACKS)

    def forget(self) -> None:
        """Take all of it away."""
        for path in (self.path, self._stopped, self.socket):
            path.unlink(missing_ok=True)


def ranks_here(where: Path) -> list[RankHere]:
    """The ranks that live, by job and rank. What is left of others is taken away."""
    found = []
    for path in where.glob("*.rank"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # it is just coming, or going
            with path.open() as file:
                rank = RankHere(path, *json.loads(file.readline()))
            if not is_near(rank.began):
                continue  # of another container, that shares the folder
            if is_alive(rank.pid, rank.began):
                found.append(rank)
            else:
                rank.forget()
    return sorted(found, key=lambda rank: (rank.job, rank.rank, rank.pid))


def is_alive(pid: int, began: str) -> bool:
    """Whether a process of this host lives that began then; its number may have passed on."""
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return True
        return False
    return bool(began) and began == when_begun(pid)


def is_near(began: str) -> bool:
    """Whether a process that began then is seen from here: its number means the same."""
    return began.partition(" ")[0] == _namespace()


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def when_begun(pid: int) -> str:
    """When a process began, and among which others; empty where it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else f"{_namespace()} {fields[18]}"


_own_beginning = functools.cache(when_begun)  # by pid, so that a fork asks anew


@attrs.define(eq=False)
class _Door:
    here: RankHere
    process: int = attrs.field(init=False, factory=os.getpid)
    file: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self.file = os.open(self.here.path, flags, 0o600)
        os.write(self.file, json.dumps(self.here[1:]).encode() + b"\n")
        # Where a handler is there, it is called as well.
        chain = signal.getsignal(ASKS_FOR_STACKS) is not signal.SIG_DFL
        faulthandler.register(ASKS_FOR_STACKS, self.file, all_threads=True, chain=chain)

    def close(self) -> None:
        """As it was before."""
        global _open
        if self.process == os.getpid():
            _open = None
            faulthandler.unregister(ASKS_FOR_STACKS)
            os.close(self.file)
            with contextlib.suppress(OSError):
                self.here.forget()


_open: _Door | None = None


def _forget_after_fork() -> None:
    """A child is no rank; what it inherited is its parent's."""
    global _open
    _open = None


os.register_at_fork(after_in_child=_forget_after_fork)


def _name_of_this(environment: LaunchEnvironment, layout: MeshLayout | None) -> RankHere:
    """This process, as another terminal is to know it."""
    path = folder()
    if not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    require_private(path)
    rank, pid = environment.rank, os.getpid()
    alone = f"pid {pid}"
    return RankHere(
        path=path / f"{pid}.rank",
        pid=pid,
        began=_own_beginning(pid),
        rank=rank,
        world_size=environment.world_size,
        where="" if layout is None else layout.name_of(layout.coordinate(rank)),
        job=f"{environment.master_addr}:{environment.master_port}"
        if environment.master_addr
        else (alone if environment.world_size == 1 else f"started by pid {os.getppid()}"),
        program=sys.argv[0] or "a prompt",
    )


def own_name(
    environment: LaunchEnvironment, layout: MeshLayout | None, undo: contextlib.ExitStack
) -> RankHere:
    """As what this process is known; from now on, until ``undo``, where it was not.

    Raises:
        RuntimeStateError: the folder cannot be had.
    """
    global _open
    if _open is None:
        try:
            _open = _Door(_name_of_this(environment, layout))
        except OSError as error:
            raise RuntimeStateError(
                f"{folder()} cannot be the folder in which ranks leave their names: {error}. "
                "DISTCTX_DIR says another one."
            ) from error
        undo.callback(_open.close)
    return _open.here


@contextlib.contextmanager
def door(environment: LaunchEnvironment, layout: MeshLayout | None) -> Iterator[None]:
    """While this lasts, another terminal finds this rank. Talks to nobody.

    Costs a small file and a handler for one signal. Where the folder cannot be had, a world opens
    without, and that is logged.
    """
    with contextlib.ExitStack() as undo:
        if hasattr(faulthandler, "register"):  # not on Windows
            try:
                own_name(environment, layout, undo)
            except RuntimeStateError as error:
                log.warning("no other terminal can look at this rank: %s", error)
        yield


def attach_command(here: RankHere) -> str:
    """What to type in another terminal of this host."""
    path = here.path.parent
    where = "" if path == _usual_folder() else f"{shlex.quote(str(path))} "
    return f"python -m distctx attach {where}{here.rank}"
