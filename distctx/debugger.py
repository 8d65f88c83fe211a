"""pdb in one rank: at its own terminal, or over a socket to a terminal that attaches."""

from __future__ import annotations

import contextlib
import json
import pdb
import select
import signal
import socket
import threading
from bdb import BdbQuit
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Debugger", "Lines", "Wire"]

#: Seconds between two looks at whether all is over.
_LOOK = 0.5
#: How much of what was said since the last line came is kept for a terminal that attaches later.
_KEPT = 200_000


class Lines:
    """JSON values over a socket, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._unread = b""

    def send(self, **what: Any) -> bool:
        """Whether it went."""
        try:
            self.socket.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """The next one, waited for; None where the other side has gone.

        Raises:
            TimeoutError: the socket has a bound, and it is over.
        """
        while b"\n" not in self._unread:
            try:
                data = self.socket.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


class Wire:
    """What pdb reads from and writes to, in place of a terminal.

    One terminal attaches at a time. While none does, reading waits; so a terminal that goes away
    leaves the rank stopped.
    """

    encoding = "utf-8"

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self._door = socket.socket(socket.AF_UNIX)
        try:
            self._door.bind(str(path))
        except OSError as error:
            raise OSError(
                f"a breakpoint needs a socket at {path}, and there can be none: {error}. "
                "DISTCTX_DIR=<a short path> puts it elsewhere."
            ) from None
        self._door.listen(8)
        self._terminal: Lines | None = None
        self._said = ""  # since the last line was read, for one that attaches later
        self._sent = 0  # how much of that the terminal has
        #: Whether another rank was told to end all: then this one quits too.
        self.is_over: Callable[[], bool] = lambda: False
        #: Gives the completions of a word; see ``Debugger.completions``.
        self.complete: Callable[[str, str, int, int], list[str]] = lambda *_: []

    def write(self, text: str) -> int:
        """Say something; the terminal sees it when it is flushed."""
        self._said += text
        if len(self._said) > _KEPT + self._sent:
            self._send(len(self._said))
        if (more := len(self._said) - _KEPT) > 0:
            left_out = "" if self._terminal is not None else "[… the beginning is left out]\n"
            self._said = left_out + self._said[more:]
            self._sent = max(0, self._sent - more) if not left_out else 0
        return len(text)

    def flush(self) -> None:
        """Send the lines that are complete; what is left over is a prompt, or becomes a line."""
        self._send(self._said.rfind("\n") + 1)

    def _send(self, end: int) -> None:
        if self._terminal is not None and end > self._sent:
            if not self._terminal.send(say=self._said[self._sent : end]):
                self._hang_up()
            self._sent = end

    def readline(self, limit: int = -1) -> str:
        """The next line that a person types, whoever it is, whenever that is."""
        while True:
            if self._terminal is None and (instead := self._accept()):
                return instead
            if (line := self._ask()) is not None:
                self._said, self._sent = "", 0
                return line + "\n"
            self._hang_up()

    def close(self, why: str) -> None:
        """Nobody is asked any more."""
        self.flush()
        if self._terminal is not None:
            self._terminal.send(end=why)
            self._hang_up()
        self._door.close()
        self.path.unlink(missing_ok=True)

    @property
    def is_open(self) -> bool:
        """Whether it can be read from."""
        return self._door.fileno() >= 0

    def _accept(self) -> str:
        """Wait for a terminal. What to do without one, where all is over, or where none can come
        any more since the runtime was closed; else empty."""
        while not select.select([self._door], [], [], _LOOK)[0]:
            if self.is_over():
                return "q\n"
            if not self.path.exists():
                return "c\n"
        connection, _ = self._door.accept()
        self._terminal, self._sent = Lines(connection), 0
        return ""

    def _ask(self) -> str | None:
        """A line from the terminal that is attached; None where it has gone."""
        terminal = self._terminal
        if terminal is None:
            return None
        self.flush()
        if not terminal.send(ask=self._said.rpartition("\n")[2]):
            return None
        while True:
            ready, _, _ = select.select([terminal.socket, self._door], [], [], _LOOK)
            if not ready and self.is_over():
                return "q"
            if self._door in ready:
                other, _ = self._door.accept()
                Lines(other).send(end="another terminal is attached to this rank")
                other.close()
            if terminal.socket not in ready:
                continue
            message = terminal.receive()
            if message is None:
                return None
            if "line" in message:
                return str(message["line"])
            words = message["complete"]
            terminal.send(matches=self.complete(words[0], words[1], words[2], words[3]))

    def _hang_up(self) -> None:
        if self._terminal is not None:
            self._terminal.close()
        self._terminal = None


class Debugger(pdb.Pdb):
    """pdb, which tells the other ranks when this one goes on.

    Args:
        wire: where it asks; None: at the terminal, as plain pdb does.
        who: this rank, in words.
        moved: called with file, line and function wherever it stops.
        release: called by the command ``release``: the others go on, this rank stays.
        go_on: called when this rank is to go on.
        give_up: called when all are to end; says who does.
    """

    def __init__(
        self,
        wire: Wire | None,
        who: str,
        *,
        moved: Callable[[str, int, str], None],
        release: Callable[[], None],
        go_on: Callable[[], None],
        give_up: Callable[[], str],
    ) -> None:
        streams: dict[str, Any] = {} if wire is None else {"stdin": wire, "stdout": wire}
        super().__init__(**streams)
        self._wire, self._who = wire, who
        self._moved, self._release, self._go_on, self._give_up = moved, release, go_on, give_up
        self._interrupt = signal.getsignal(signal.SIGINT)
        self._goes_on = False
        if wire is not None:
            self.prompt = f"({who}) "
            wire.complete = self.completions

    def interaction(self, frame: FrameType | None, *rest: Any, **named: Any) -> None:
        """Stop, and say where."""
        if frame is not None:
            self._moved(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        self._goes_on = False
        super().interaction(frame, *rest, **named)
        if self._goes_on:  # here, since the command loop takes Ctrl-C for its own
            self._leave()

    def set_continue(self) -> None:
        """Go on, with all ranks; breakpoints that were set meanwhile stop this one alone."""
        super().set_continue()
        self._goes_on = True

    def _leave(self) -> None:
        if self._wire is not None and not self.breaks:
            self._wire.close(f"{self._who} goes on")
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, self._interrupt)  # which pdb took for Ctrl-C
        self._go_on()

    def set_quit(self) -> None:
        """End all ranks."""
        super().set_quit()
        said = self._give_up()
        if self._wire is not None:
            self._wire.close(said)

    def set_stepinstr(self) -> None:
        """Stop in the line after the call, as pdb did before Python 3.13."""
        self.set_step()

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """As pdb's, but that quitting is no error with a traceback."""
        try:
            return super().trace_dispatch(frame, event, arg)
        except BdbQuit:
            raise SystemExit(0) from None

    def do_release(self, _: str) -> None:
        """release

        Let the other ranks go on, and stay here: before stepping over a collective, which needs
        them.
        """
        self._release()
        self.message("The other ranks go on.")

    def do_interact(self, arg: str) -> None:
        """interact

        Start a Python prompt; not over a socket.
        """
        if self._wire is None:
            super().do_interact(arg)
        else:
            self.error("interact needs a terminal of the rank's own; type statements here, with !")

    def do_run(self, arg: str) -> None:
        """A rank cannot be started again alone."""
        self.error("a rank cannot be started again alone; q ends all of them")

    do_restart = do_run

    def completions(self, text: str, line: str, begin: int, end: int) -> list[str]:
        """What TAB offers for a word: commands at the start of a line, and expressions."""
        command = self.parseline(line)[0]
        found: list[str] = list(self.completenames(text, line, begin, end)) if begin == 0 else []
        complete: Any = getattr(self, f"complete_{command}", None) if begin else None
        with contextlib.suppress(Exception):  # it evaluates what stands there, which may fail
            found += (complete or self.complete_p)(text, line, begin, end)
        return list(dict.fromkeys(found))
