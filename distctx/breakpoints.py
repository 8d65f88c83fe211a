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
from distctx.arguments import as_int
from distctx.bounded import run_bounded
from distctx.exceptions import LayoutError, RemoteRankError, RendezvousTimeoutError
from distctx.layout import MeshLayout
from distctx.reports import list_ranks
from distctx.stores import Store, backoff, peek
from distctx.sync import next_turn, show_life, store_must_answer

if TYPE_CHECKING:
    from distctx.debugger import Wire
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
    meant = ranks is None or rank in ranks
    coordinate = layout.coordinate(rank)
    for name, given in dims.items():
        index, dim = as_int(given, name), layout.dim(name)
        if not 0 <= index < layout.shape[dim]:
            raise LayoutError(
                f"{name}={index} is out of range; it goes from 0 to {layout.shape[dim] - 1}."
            )
        meant = meant and coordinate[dim] == index
    return meant and (when is None or bool(when))


def stop(world: World, layout: MeshLayout, meant: bool, frame: FrameType) -> None:
    """All ranks come here; those who are meant stop in ``frame``, the others wait in the store."""
    others = None if world.is_alone else _Others(world, next_turn(world, "breakpoint()"))
    # What can fail in this rank alone comes before it says that it stops.
    stopped = _Stop(world, layout, others, frame) if meant else None
    if others is not None:
        others.arrive(stopped.card() if stopped else None)
    if stopped is not None:
        stopped.ask(frame)
    elif others is not None:
        others.wait()


#: What this process listens on; one that pdb's own breakpoints keep open serves the next stop too.
_wire: Wire | None = None


class _Stop:
    """One rank at one breakpoint, on the side that stops."""

    def __init__(
        self, world: World, layout: MeshLayout, others: _Others | None, frame: FrameType
    ) -> None:
        global _wire
        from distctx.debugger import Wire  # pdb is slow to import, and rarely wanted

        self.world, self.others = world, others
        self.here = debug.own_name(world.environment, layout, world.undo)
        if _has_terminal():
            self.wire = None
        elif _wire is not None and _wire.is_open and _wire.path == self.here.socket:
            self.wire = _wire
        else:
            self.wire = _wire = Wire(self.here.socket)
        self.who = f"rank {world.rank} of {world.world_size}"
        self.at = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def card(self) -> str:
        """Who stops where, for the others."""
        here, host = self.here, socket.gethostname()
        card = {"rank": here.rank, "host": host, "pid": here.pid, "began": here.began}
        return json.dumps(card | {"at": self.at})

    def ask(self, frame: FrameType) -> None:
        """Be in pdb from the caller's next line on."""
        from distctx.debugger import Debugger

        self.world.leave = self.let_go
        if self.others is not None:
            self.world.others_wait = (
                "The other ranks wait at a breakpoint until this one goes on; the command release "
                "lets them go on before."
            )
        if self.wire is not None:
            self.wire.is_over = self.others.is_over if self.others else lambda: False
            waiting = "" if self.others is None else "; the others wait"
            debug.announce(
                f"[distctx] {self.who} is stopped at {self.at}{waiting}. In another terminal on "
                f"{socket.gethostname()}:\n    {debug.attach_command(self.here)}"
            )
        Debugger(
            self.wire,
            self.who,
            moved=lambda *place: self.here.stop_at(debug.Stopped(*place)),
            release=self.release,
            go_on=self.go_on,
            give_up=self.give_up,
        ).set_trace(frame)

    def release(self) -> None:
        """The others go on, this rank stays."""
        if self.others is not None:
            self.world.others_wait = ""
            self.others.release()

    def let_go(self) -> None:
        """This rank is stopped no longer."""
        self.here.run_on()
        self.release()
        self.world.leave = lambda: None

    def go_on(self) -> None:
        """With all who wait or are stopped too."""
        self.let_go()
        if self.others is not None:
            self.others.wait()

    def give_up(self) -> str:
        """End all ranks, as far as they are here; says who ends."""
        ends, told = f"{self.who} ends", False
        if self.others is not None:
            if self.others.released.is_set():
                ends += "; the others had gone on"
            else:
                told = self.others.is_over()
                self.others.end()
                ends += f", with all {self.world.world_size} ranks"
        self.let_go()
        if not told:  # another one was asked to, and has said so
            debug.announce(f"[distctx] told to quit at {self.at}: {ends}")
        return ends


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
            show_life(self.turn, f"beat/{self.number}", _BEAT, self.released)
        self._ask(lambda: self.turn.add("arrived", 1))

    def _ask(self, request: Callable[[], Any]) -> Any:
        with store_must_answer(self.world, "breakpoint()"):
            return run_bounded(request, self.world.timeout.total_seconds())

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

    def is_over(self) -> bool:
        """Whether all ranks are to end; so it is too where nobody can say any more."""
        try:
            return run_bounded(lambda: peek(self.turn, "end"), 5.0) is not None
        except TimeoutError:
            return False
        except RuntimeError:
            return True

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
        if card["host"] == socket.gethostname() and debug.is_near(card["began"]):
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
