"""The other terminal: ``python -m distctx attach`` and ``python -m distctx stacks``."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from distctx.debug import RankHere, Stopped, folder, ranks_here, require_private
from distctx.debugger import Lines
from distctx.display import table
from distctx.traces import is_torch, process_state, shown, stand

__all__ = ["attach", "stacks"]

#: Seconds in which a rank writes its stacks, and for which they must not grow to be whole.
_ANSWER, _QUIET = 2.0, 0.05
#: Seconds in which a stopped rank comes to the prompt.
_PROMPT = 10.0


def _look(where: str | None) -> list[RankHere]:
    """The ranks of a folder; from now on whatever they say can be printed."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    path = Path(where) if where else folder()
    if not path.exists():
        return []
    require_private(path)
    return ranks_here(path)


def _coordinate(rank: RankHere) -> str:
    return f" at {rank.where}" if rank.where else ""


def _at(place: Stopped) -> str:
    return f"{shown(place.file)}:{place.line} in {place.function}"


# attach


def attach(where: str | None, rank: int | None, pid: int | None) -> int:
    """List the stopped ranks, or speak with one until it goes on or the person leaves.

    Args:
        where: the folder to look in; None: this user's.
        rank: which one to open.
        pid: the process to open, where several jobs have such a rank.

    Returns:
        The exit status.
    """
    stopped = [(one, place) for one in _look(where) if (place := one.stopped) is not None]
    if rank is None and pid is None:
        return _list(stopped)
    found = [
        (one, place)
        for one, place in stopped
        if rank in (None, one.rank) and pid in (None, one.pid)
    ]
    if len(found) == 1:
        return _speak(*found[0])
    asked = f"rank {rank}" if pid is None else f"pid {pid}"
    if found:
        print(f"Several jobs have {asked} stopped; say which with --pid:", file=sys.stderr)
        _list(found)
    else:
        print(f"{asked} is not stopped here.", file=sys.stderr)
        _list(stopped)
    return 1


def _list(stopped: Sequence[tuple[RankHere, Stopped]]) -> int:
    if not stopped:
        print("No rank of yours is stopped on this machine.")
        return 0
    rows = []
    for one, place in stopped:
        rank = f"{one.rank}/{one.world_size}{_coordinate(one)}"
        rows.append((rank, str(one.pid), _at(place), one.job))
    print(table(rows, ("rank", "pid", "stopped at", "job")))
    return 0


def _speak(rank: RankHere, place: Stopped) -> int:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_PROMPT)
    try:
        connection.connect(str(rank.socket))
    except OSError:
        print(
            f"rank {rank.rank} (pid {rank.pid}) does not listen: it is stopped at a terminal of "
            "its own, or has just gone on.",
            file=sys.stderr,
        )
        return 1
    with contextlib.closing(Lines(connection)) as wire:
        try:
            return _converse(wire, rank, place)
        except TimeoutError:
            print(f"rank {rank.rank} does not come to its prompt", file=sys.stderr)
            return 1


def _converse(wire: Lines, rank: RankHere, place: Stopped) -> int:
    """Until the rank hangs up, or the person does."""
    who = f"rank {rank.rank} of {rank.world_size}{_coordinate(rank)}"
    print(f"[{who}, pid {rank.pid}, at {_at(place)}]")
    _edit_lines(wire)
    with _interrupts_go_to(rank):
        while (message := wire.receive()) is not None:
            wire.socket.settimeout(None)
            if "say" in message:
                print(message["say"], end="", flush=True)
            elif "end" in message:
                print(f"[{message['end']}]")
                return 0
            elif "ask" in message and not _answer(wire, message["ask"]):
                print(f"[detached; rank {rank.rank} stays stopped]")
                return 0
    print(f"\nrank {rank.rank} has ended", file=sys.stderr)
    return 1


@contextlib.contextmanager
def _interrupts_go_to(rank: RankHere) -> Iterator[None]:
    """Ctrl-C stops what the rank runs. It is no exception here, which could lose a message."""

    def interrupt(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _answer(wire: Lines, prompt: str) -> bool:
    """Ask the person, and send the line; False where there is none to come."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            try:
                line = input(prompt)
            except KeyboardInterrupt:  # what was typed so far is dropped, as at any prompt
                print()
                continue
            except EOFError:
                print()
                return False
            return wire.send(line=line)
    finally:
        signal.signal(signal.SIGINT, before)


def _edit_lines(wire: Lines) -> None:
    """Line editing, a history, and TAB, which the rank answers."""
    try:
        import readline
    except ImportError:
        return
    matches: list[str] = []

    def complete(text: str, state: int) -> str | None:
        if state == 0:
            line = readline.get_line_buffer()
            begin, end = readline.get_begidx(), readline.get_endidx()
            wire.send(complete=[text, line, begin, end])
            answer = wire.receive() or {}
            matches[:] = answer.get("matches", [])
        return matches[state] if state < len(matches) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n`@#%^&*()=+[{]}\\|;:'\",<>?")
    readline.parse_and_bind("tab: complete")


# stacks


def stacks(where: str | None) -> int:
    """Ask every rank of this user here where it stands, and print it; returns the exit status."""
    ranks = _look(where)
    if not ranks:
        print("No rank of yours is open on this machine.")
        return 1
    with _alone(ranks[0].path.parent):
        answers = _ask(ranks)
    for index, (job, group) in enumerate(groupby(ranks, key=lambda rank: rank.job)):
        print("\n" * bool(index) + "\n".join(_of_job(job, list(group), answers)))
    return 0


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One at a time asks, so that no answer is taken for another's."""
    with (path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ask(ranks: Sequence[RankHere]) -> dict[int, str]:
    """The stacks of each, by pid; "" where it does not answer."""
    for rank in ranks:
        rank.ask_for_stacks()
    sizes: dict[int, int] = {}
    end = quiet = time.monotonic() + _ANSWER
    while time.monotonic() < min(end, quiet):
        time.sleep(0.01)
        now = {rank.pid: len(rank.stacks()) for rank in ranks}
        if now != sizes:
            sizes = now
            quiet = time.monotonic() + _QUIET if all(now.values()) else end
    return {rank.pid: rank.stacks() for rank in ranks}


def _of_job(job: str, ranks: Sequence[RankHere], answers: dict[int, str]) -> Iterator[str]:
    """First where everybody stands, then each stack once."""
    program = shown(ranks[0].program)
    plural = "s" if len(ranks) > 1 else ""
    yield f"{program}, job {job}: {len(ranks)} of {ranks[0].world_size} rank{plural} here"
    by_place: dict[str, list[RankHere]] = {}
    by_stack: dict[str, list[RankHere]] = {}
    for rank in ranks:
        text = answers[rank.pid]
        by_place.setdefault(_stands_at(rank, text), []).append(rank)
        alike = re.sub(r"(Current thread|Thread) 0x[0-9a-f]+", "Thread", text.strip())
        if alike:
            by_stack.setdefault(alike, []).append(rank)
    for place, those in by_place.items():
        yield f"{_spans(those)}: {place}"
    for text, those in by_stack.items():
        yield f"\n{_spans(those)} (pid {', '.join(str(rank.pid) for rank in those[:8])}):\n{text}"


def _stands_at(rank: RankHere, text: str) -> str:
    """The last line outside torch, and what of torch was called there."""
    if not text:
        return f"does not answer; its state is {process_state(rank.pid) or 'ended'}"
    if (stopped := rank.stopped) is not None:
        path, line, _ = stopped
        return f"{shown(path)}:{line} stopped in the debugger"
    frame, inner = stand(text)
    called = [one.name for one in inner if is_torch(one.path) and one.name not in _WRAPPERS]
    what = f" {called[-1]}" if called else ""
    if frame is None:
        return f"outside any program{what}"
    return f"{shown(frame.path)}:{frame.line}{what}"


#: What torch puts around its calls.
_WRAPPERS = frozenset({"wrapper", "inner", "_fn", "<lambda>", "__call__"})


def _spans(ranks: Sequence[RankHere]) -> str:
    """``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for number in sorted(rank.rank for rank in ranks):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
