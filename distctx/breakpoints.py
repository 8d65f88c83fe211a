"""All ranks come to a breakpoint; some stop in pdb, the others wait in the store."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import attrs

from distctx import debug
from distctx.exceptions import LayoutError, RemoteRankError, RendezvousTimeoutError
from distctx.layout import MeshLayout, as_int
from distctx.reports import list_ranks
from distctx.stores import Store, backoff, peek, run_bounded
from distctx.sync import next_turn, store_must_answer

if TYPE_CHECKING:
    from distctx.world import World

__all__ = ["selects", "stop"]

#: Seconds between two signs of life of a stopped rank, and without one before the ranks of other
#: hosts give it up. On its own host it is known whether it lives.
_BEAT, _SILENCE = 2.0, 60.0


def selects(
    layout: MeshLayout,
    rank: int,
    wanted: int | Sequence[int] | None,
    when: object,
    dims: Mapping[str, int],
) -> bool:
    """Whether a breakpoint is meant for this rank; rank 0 where nothing says.

    Raises:
        LayoutError: no such rank, dim or index; alike on every rank.
    """
    if wanted is None and when is None and not dims:
        wanted = 0
    ranks: Sequence[int] | None = None
    if wanted is not None:
        ranks = wanted if isinstance(wanted, Sequence) else (wanted,)
        for one in ranks:
            layout.coordinate(one)
    coordinate = layout.coordinate(rank)
    for name, given in dims.items():
        index, dim = as_int(given, name), layout.dim(name)
        if not 0 <= index < layout.shape[dim]:
            raise LayoutError(
                f"{name}={index} is out of range; it goes from 0 to {layout.shape[dim] - 1}."
            )
    meant = ranks is None or rank in ranks
    meant = meant and all(coordinate[layout.dim(name)] == index for name, index in dims.items())
    return meant and (when is None or bool(when))


def stop(world: World, layout: MeshLayout, meant: bool, frame: FrameType) -> None:
    """All ranks come here; those who are meant stop in ``frame``, the others wait in the store."""
    others: _Others | None = None
    if world.world_size > 1 and world.backend != "fake":
        others = _Others(world, next_turn(world, "breakpoint()"))
        others.arrive(_card(world, frame) if meant else None)
    if meant:
        _prompt(world, layout, frame, others)
    elif others is not None:
        others.wait()


def _card(world: World, frame: FrameType) -> str:
    """Who stops where, for the others."""
    return json.dumps(
        {
            "rank": world.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": debug.when_begun(os.getpid()),
            "at": f"{frame.f_code.co_filename}:{frame.f_lineno}",
        }
    )


def _prompt(world: World, layout: MeshLayout, frame: FrameType, others: _Others | None) -> None:
    from distctx.debugger import Debugger, Wire  # pdb is slow to import, and rarely wanted

    here = debug.own_name(world.environment, layout, world.undo)
    wire = None if _has_terminal() else Wire(here.socket)
    who = f"rank {world.rank} of {world.world_size}"
    at = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def moved(path: str, line: int, function: str) -> None:
        here.stop_at(debug.Stopped(path, line, function))

    def let_go() -> None:
        here.run_on()
        if others is not None:
            world.others_wait = ""
            others.release()

    def go_on() -> None:
        let_go()
        if others is not None:
            others.wait()

    def give_up() -> None:
        if others is not None:
            others.end()
        let_go()
        ranks = f"all {world.world_size} ranks end" if world.world_size > 1 else "it ends"
        debug.announce(f"[distctx] {who} was told to quit at {at}: {ranks}")

    if others is not None:
        world.others_wait = (
            "The other ranks wait at a breakpoint until this one goes on; the command release lets "
            "them go on before."
        )
    world.undo.callback(let_go)
    debugger = Debugger(wire, who, moved=moved, release=let_go, go_on=go_on, give_up=give_up)
    if wire is not None:
        waiting = "" if others is None else "; the others wait"
        debug.announce(
            f"[distctx] {who} is stopped at {at}{waiting}. In another terminal on "
            f"{socket.gethostname()}:\n    {debug.attach_command(here)}"
        )
    debugger.set_trace(frame)


def _has_terminal() -> bool:
    """Whether a person can be asked right here: at a terminal in whose foreground this process is,
    or where somebody answers for ``input``, as a notebook does."""
    if getattr(builtins.input, "__self__", builtins) is not builtins:
        return True
    try:
        number = sys.stdin.fileno()
        mine = os.isatty(number) and os.tcgetpgrp(number) == os.getpgrp()
        return mine and sys.stdin.isatty() and sys.stdout.isatty()
    except (OSError, ValueError, AttributeError):  # closed, replaced, or no terminal of ours
        return False


@attrs.define(eq=False)
class _Others:
    """The ranks of one breakpoint, which meet in the store and wait there without a collective."""

    world: World
    turn: Store
    number: int = attrs.field(init=False, default=0)
    released: threading.Event = attrs.field(init=False, factory=threading.Event)
    beats: dict[int, tuple[int, float]] = attrs.field(init=False, factory=dict)

    def arrive(self, card: str | None) -> None:
        """Come, and say who stops."""
        self._ask(lambda: self.turn.set(f"here/{self.world.rank}", "1"))
        if card is not None:
            self.number = self._ask(lambda: self.turn.add("stopped", 1))
            self._ask(lambda: self.turn.set(f"stopped/{self.number}", card))
            threading.Thread(target=self._beat, name="distctx-breakpoint", daemon=True).start()
        self._ask(lambda: self.turn.add("arrived", 1))

    def _ask(self, request: Callable[[], Any]) -> Any:
        with store_must_answer(self.world, "breakpoint()"):
            return run_bounded(request, self.world.timeout.total_seconds())

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone, and those who listen
            while not self.released.wait(_BEAT):
                self.turn.add(f"beat/{self.number}", 1)

    def release(self) -> None:
        """This rank is stopped no longer."""
        if not self.released.is_set():
            self.released.set()
            with contextlib.suppress(RuntimeError, TimeoutError):
                run_bounded(lambda: self.turn.set(f"released/{self.number}", "1"), 5.0)

    def end(self) -> None:
        """All ranks are to end."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            run_bounded(lambda: self.turn.set("end", str(self.world.rank)), 5.0)

    def wait(self) -> None:
        """Wait until all have come and nobody is stopped.

        As long as somebody is, without a bound, but only while that rank lives; for those who have
        not come, for the group's timeout.
        """
        bound = self.world.timeout.total_seconds()
        heard = time.monotonic()
        for pause in backoff(longest=0.25):
            arrived, cards, over = self._ask(self._look)
            if over:
                raise SystemExit(0)
            for number, card in cards.items():
                heard = time.monotonic()
                self._require_alive(number, json.loads(card))
            if not cards and arrived >= self.world.world_size:
                return
            if time.monotonic() - heard > bound:
                raise self._absent(bound)
            time.sleep(pause)

    def _look(self) -> tuple[int, dict[int, str], bool]:
        """How many have come, who is stopped, and whether all is over."""
        arrived = self.turn.add("arrived", 0)  # first: who stops says so before it counts as come
        numbers = range(1, self.turn.add("stopped", 0) + 1)
        cards = {
            number: peek(self.turn, f"stopped/{number}")
            for number in numbers
            if number != self.number and peek(self.turn, f"released/{number}") is None
        }
        over = peek(self.turn, "end") is not None
        return arrived, {number: card for number, card in cards.items() if card}, over

    def _require_alive(self, number: int, card: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if card["host"] == socket.gethostname():
            lives = debug.is_alive(card["pid"], card["began"])
        else:
            beat = self._ask(lambda: self.turn.add(f"beat/{number}", 0))
            last, since = self.beats.setdefault(number, (beat, now))
            if beat != last:
                self.beats[number] = beat, now
            lives = beat != last or now - since < _SILENCE
        if not lives and peek(self.turn, f"released/{number}") is None:
            raise RemoteRankError(
                f"Rank {card['rank']} (pid {card['pid']} on {card['host']}) ended while it was "
                f"stopped at {card['at']}, so this rank cannot go on.",
                rank=card["rank"],
            )

    def _absent(self, bound: float) -> RendezvousTimeoutError:
        world = self.world
        absent = [r for r in range(world.world_size) if peek(self.turn, f"here/{r}") is None]
        return RendezvousTimeoutError(
            f"Rank {world.rank} waited in breakpoint() for {list_ranks(absent)} of "
            f"{world.world_size}, which did not come within {bound:g} s; every rank must reach the "
            "breakpoint, also those that do not stop there.",
            missing_ranks=absent,
        )
