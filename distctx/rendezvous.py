"""The ranks meet in the store before they build, so that nobody waits for someone who never comes.

Every start of a world, and every first touch of a mesh, is a *room*: a prefix in the store. Rank 0
opens a room under a fresh number kept in the store, the others follow the newest. A rank arrives
once, under its own key, and counts itself by what it wants; so one number tells whether all are
there and agree. A room is settled once, for all, by ``compare_set`` on its verdict: rank 0 says go
or disagree, and any rank may give up when its time is over. A settled room is never joined.

That nobody but rank 0 says go to start a world is what keeps out the dead: a rank that was started
again may come to a room of those who waited for it in vain and are gone, and would be the last of
all there. Rank 0, started again, is in another. A world's own rooms are new with it, so there the
last to come says go, which spares all a wait.

The others look at the verdict again and again, rather than to let torch wait for it: a wait of
torch's that times out writes two warnings.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import attrs

from distctx.bounded import run_bounded
from distctx.exceptions import DistctxError, RendezvousError, RendezvousTimeoutError
from distctx.meeting import Meeting
from distctx.progress import Progress
from distctx.reports import DISAGREE, GAVE_UP, SHOWN, TWICE, failure, list_ranks, name_of
from distctx.stores import (
    PrefixStore,
    Store,
    await_key,
    backoff,
    discard,
    peek,
    wait_for_count,
)

__all__ = ["meet"]

#: Seconds given to the rest to arrive once some are known to disagree, so that all are told.
_GRACE = 1.0
#: Seconds beyond its timeout that a meeting may take: to answer, and to tell why it failed.
_ANSWER = 6.0
#: The pause, in seconds, from which on a wait looks at more than whether it is over.
_CALM = 0.005
#: Seconds that a rank stays until the others have read why a room failed.
_LINGER = 2.0
#: How far beyond its own world, as a factor, a rank looks for those that believe in a larger one.
_FARTHEST = 64

#: How a meeting can end well; and a room that a guest has left for a newer one.
_GO, _LEFT = "go", "left"

#: How a rank stands to the newest room: not in it; in it; kept out, since its rank is taken there.
_OUTSIDE, _INSIDE, _REFUSED = "outside", "inside", "refused"


def meet(
    store: Store,
    rank: int,
    world_size: int,
    wants: Mapping[str, Any],
    timeout: timedelta,
    *,
    place: str,
    purpose: str,
    need_local: bool | None = None,
    expected: int = 0,
) -> Meeting:
    """Wait until all ranks have arrived and agree. Talks to every rank through ``store``.

    Args:
        store: where to meet.
        rank: who this is.
        world_size: how many come.
        wants: what this rank asks for; must be the same on all, and go into JSON.
        timeout: how long to wait at the most.
        place: where that is, in words, for the errors.
        purpose: for what, in words, for the errors.
        need_local: also find out which rank of its host this is; None: no rank asks for that.
        expected: the number of the room that is likely to be next among those of one world, which
            spares the others a question and the wait for rank 0 to open it; 0: not known, since
            the rooms may be of an earlier run.

    Raises:
        RankDisagreementError: all came, but do not want the same; raised on every rank.
        RendezvousTimeoutError: some did not come in time; raised on every rank that did.
        RendezvousError: two processes claim one rank, or the store is lost.
    """
    wants = {"world_size": world_size, **wants}
    guest = _Guest(store, rank, world_size, wants, timeout, place, purpose, need_local, expected)
    bound = timeout.total_seconds() + _ANSWER
    try:
        return run_bounded(guest.meet, bound, guest.cancelled.set)
    except DistctxError:
        raise
    except TimeoutError as error:
        discard(store)
        raise RendezvousError(
            f"Rank {rank} got no answer from the store at {place} within {bound:g} s while the "
            f"ranks met {purpose}. The process that serves it, mostly rank 0 or the launcher, is "
            "stopped, or the network to it is down."
        ) from error
    except RuntimeError as error:
        discard(store)
        raise RendezvousError(
            f"Rank {rank} lost the store at {place} while the ranks met {purpose}: "
            f"{str(error).splitlines()[0]}. The process that serves it, mostly rank 0 or the "
            "launcher, has ended; look there for the first error."
        ) from error
    finally:
        guest.progress.close()


@attrs.define(eq=False, repr=False)
class _Guest:
    """One rank on its way through one meeting."""

    lobby: Store
    rank: int
    world_size: int
    wants: Mapping[str, Any]
    timeout: timedelta
    place: str
    purpose: str
    need_local: bool | None
    expected: int

    #: The room that this rank came to last.
    number: int = attrs.field(init=False, default=0)
    progress: Progress = attrs.field(init=False)
    absent: tuple[int, str] | None = attrs.field(init=False, default=None)
    cancelled: threading.Event = attrs.field(init=False, factory=threading.Event)
    #: The room that counts this rank; None where none does.
    inside: Store | None = attrs.field(init=False, default=None)
    card: str = attrs.field(init=False)
    want_key: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.progress = Progress(self.timeout.total_seconds())
        digest = hashlib.sha256(_as_text(self.wants).encode()).hexdigest()
        self.want_key = f"want/{digest[:16]}"
        card = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid()}
        self.card = json.dumps(card | {"wants": self.wants, "id": secrets.token_hex(8)})

    def meet(self) -> Meeting:
        """The whole way. An interrupted wait, as by Ctrl-C at a prompt, takes the arrival back."""
        try:
            return self.open_room() if self.rank == 0 else self.find_room()
        except Exception:
            raise
        except BaseException:
            self._withdraw()
            raise

    def open_room(self) -> Meeting:
        """Rank 0's way: open a room, wait until all are in it, settle it."""
        while True:
            self.number = self.lobby.add("rooms", 1)
            room = self._room(self.number)
            if peek(room, "verdict") is None:
                break  # else the others had come, and given up
        agreed = self._arrive(room)
        disagreed_at = 0.0
        pauses = backoff()
        while True:
            pause = next(pauses)
            if agreed >= self.world_size:
                return self._settle(room, _GO)
            now = time.monotonic()
            if pause >= _CALM or self._left() <= 0:
                if room.add("kinds", 0) > 1 and len(_kinds(cards := self._cards(room))) > 1:
                    disagreed_at = disagreed_at or now
                    if len(cards) >= self.world_size or now > disagreed_at + _GRACE:
                        return self._settle(room, DISAGREE)
                if self.lobby.add("rooms", 0) != self.number:
                    raise self._superseded()
                if peek(room, "twice"):
                    return self._settle(room, TWICE)
                if verdict := peek(room, "verdict"):
                    return self._obey(room, verdict)
                if self.progress.is_due():
                    self.progress.tell(self._absent(room, agreed), self.purpose, aloud=True)
            if self._left() <= 0:
                return self._settle(room, GAVE_UP)
            self._sleep(pause)
            agreed = room.add(self.want_key, 0)

    def find_room(self) -> Meeting:
        """Every other rank's way: follow the newest room, arrive in it, wait for its verdict."""
        room, standing = self._room(0), _OUTSIDE
        newest, opened = self.expected, 0
        pauses = backoff()
        while True:
            pause = next(pauses)
            verdict = None
            is_stale = newest == self.number  # nothing is known of a newer one
            if is_stale and (standing == _OUTSIDE or pause >= _CALM or self._left() <= 0):
                opened = self.lobby.add("rooms", 0)
                newest = max(self.number, opened)
            if newest != self.number:
                if standing != _OUTSIDE and (verdict := self._leave(room, standing)):
                    return self._obey(room, verdict, standing)
                self.number, room, standing = newest, self._room(newest), _OUTSIDE
                if peek(room, "verdict") is None:
                    agreed = self._arrive(room)
                    standing = _INSIDE if agreed else _REFUSED
                    if self.expected and agreed >= self.world_size:
                        return self._settle(room, _GO)
            elif standing != _OUTSIDE:  # not at once: nobody settles it as fast as that
                verdict = peek(room, "verdict")
            if verdict and verdict != _LEFT:
                return self._obey(room, verdict, standing)
            if self._left() <= 0:
                if standing == _OUTSIDE:
                    raise self._not_let_in(room)
                return self._settle(room, GAVE_UP if standing == _INSIDE else TWICE, standing)
            if self.progress.is_due():
                is_in = standing == _INSIDE and opened >= self.number
                whom = "all ranks" if is_in else "rank 0"
                what_for = f"{self.purpose}, as rank {self.rank} at {self.place}"
                # Who is absent is rank 0's to say; where it is rank 0, the next one says it.
                self.progress.tell(whom, what_for, aloud=not is_in and self.rank == 1)
            self._sleep(pause)

    def _leave(self, room: Store, standing: str) -> str | None:
        """Leave a room for a newer one, so that it can never be let go without this rank.

        Returns its verdict where it was settled before. Who was kept out has nothing to leave, and
        that others left says nothing: the one who holds its rank may be dead, of an earlier run.
        """
        if standing == _REFUSED:
            said = peek(room, "verdict") or _LEFT
        else:
            said = room.compare_set("verdict", "", _LEFT).decode()
        return None if said == _LEFT else said

    def _room(self, number: int) -> Store:
        return PrefixStore(str(number), self.lobby)

    def _left(self) -> float:
        """Seconds until this rank's time is over."""
        return self.progress.start + self.timeout.total_seconds() - time.monotonic()

    def _sleep(self, pause: float) -> None:
        if self.cancelled.is_set():
            raise KeyboardInterrupt
        time.sleep(max(0.0, min(pause, self._left())))

    def _arrive(self, room: Store) -> int:
        """Take this rank's place. Returns how many are there who want the same, this one with
        them; 0 where another process has its place, who is told of that."""
        self.inside = None
        if room.compare_set(f"rank/{self.rank}", "", self.card).decode() != self.card:
            room.set("twice", self.card)
            return 0
        if self.need_local:
            room.set("need_local", "1")
        agreed = room.add(self.want_key, 1)
        if agreed == 1:
            room.add("kinds", 1)
        self.inside = room
        return agreed

    def _withdraw(self) -> None:
        """Take the arrival back, so that this rank can come again."""
        room, self.inside = self.inside, None
        if room is not None:
            if room.add(self.want_key, -1) == 0:
                room.add("kinds", -1)
            room.delete_key(f"rank/{self.rank}")

    # How it ends: one rank settles the room, the others obey.

    def _settle(self, room: Store, kind: str, standing: str = _INSIDE) -> Meeting:
        """Settle the room, unless somebody was faster; returns or raises what came of it."""
        verdict = f"{kind}/{secrets.token_hex(4)}"
        if kind == _GO and self.need_local is not None and peek(room, "need_local"):
            self._number_by_host(room)
        said = room.compare_set("verdict", "", verdict).decode()
        if said == verdict and kind != _GO:
            room.set("report", json.dumps(self._look_around(room)))
        return self._obey(room, said, standing)

    def _obey(self, room: Store, verdict: str, standing: str = _INSIDE) -> Meeting:
        if standing == _REFUSED:
            raise self._rank_is_taken(room)
        kind, _, token = verdict.partition("/")
        if kind == _LEFT:
            raise self._superseded() if self.rank == 0 else self._not_let_in(room)
        if kind == _GO:
            local = peek(room, f"local/{self.rank}") if self.need_local else None
            place = tuple(json.loads(local)) if local else None
            return Meeting(token, room, self.number, place)
        report = self._read_report(room)
        raise failure(kind, report, self.purpose, self.place, self.world_size)

    def _number_by_host(self, room: Store) -> None:
        """Tell each rank which of its host it is: in the order of ranks, by the name of the
        host."""
        hosts: dict[str, list[int]] = {}
        for rank, card in self._cards(room).items():
            hosts.setdefault(card["host"], []).append(rank)
        for ranks in hosts.values():
            for index, rank in enumerate(ranks):
                room.set(f"local/{rank}", json.dumps([index, len(ranks)]))

    def _cards(self, room: Store) -> dict[int, dict[str, Any]]:
        """Who has arrived, by rank. One request a rank, so only where it is needed.

        Beyond its own world it looks for a rank that believes in a larger one: as far as a world
        goes that somebody here believes in, and on while a kind of wants is counted and not found.
        """
        cards: dict[int, dict[str, Any]] = {}
        found: set[str] = set()
        kinds, largest = room.add("kinds", 0), self.world_size
        for rank in range(_FARTHEST * self.world_size):
            if rank >= largest and len(found) >= kinds:
                break
            if text := peek(room, f"rank/{rank}"):
                card = cards[rank] = json.loads(text)
                found.add(_as_text(card["wants"]))
                largest = max(largest, card["wants"]["world_size"])
        return cards

    def _look_around(self, room: Store) -> dict[str, Any]:
        """What there is to tell about a meeting that failed, small enough for a store."""
        cards = self._cards(room)
        twice = peek(room, "twice")
        return {
            "missing": [rank for rank in range(self.world_size) if rank not in cards],
            "guests": [[rank, name_of(card)] for rank, card in list(cards.items())[:SHOWN]],
            "arrived": len(cards),
            "wants": _kinds(cards),
            "twice": json.loads(twice) if twice else None,
            "seconds": round(self.timeout.total_seconds(), 3),
        }

    def _read_report(self, room: Store) -> dict[str, Any]:
        """Why the room failed; empty where the one who settled it did not live to say. Rank 0, who
        may serve the store, stays until all have read it."""
        text = await_key(room, "report", _LINGER)
        room.add("read", 1)
        report: dict[str, Any] = json.loads(text) if text else {}
        if self.rank == 0:
            wait_for_count(room, "read", report.get("arrived", 0), time.monotonic() + _LINGER)
        return report

    def _superseded(self) -> RendezvousError:
        """Another process opened the next room as rank 0. It is told, and so are all."""
        room = self._room(self.lobby.add("rooms", 0))
        room.set("twice", self.card)
        return self._rank_is_taken(room)

    def _rank_is_taken(self, room: Store) -> RendezvousError:
        other = await_key(room, f"rank/{self.rank}", _GRACE)  # it may be just about to arrive
        who = name_of(json.loads(other)) if other else "another process"
        return RendezvousError(
            f"Two processes claim rank {self.rank} of {self.world_size} at {self.place}: {who} and "
            f"{name_of(json.loads(self.card))}. Give each process its own rank, and end what is "
            "left of an earlier run."
        )

    def _not_let_in(self, room: Store) -> DistctxError:
        """Time is over, and no room was open to this rank: rank 0 opens them."""
        verdict = (peek(room, "verdict") or "").partition("/")[0]
        report = json.loads(peek(room, "report") or "{}")
        late = ""
        if verdict in (GAVE_UP, DISAGREE, TWICE):
            last = failure(verdict, report, self.purpose, self.place, self.world_size)
            late = f" The last meeting there failed before this rank came: {last} --"
        seconds = self.timeout.total_seconds()
        return RendezvousTimeoutError(
            f"Rank 0 did not come {self.purpose} within {seconds:g} s at {self.place}; without it "
            f"nothing is known of the other ranks.{late} Check that rank 0 was started, is alive, "
            "and reaches this line of the program too; a longer wait is rendezvous_timeout=.",
            missing_ranks=(0,),
        )

    def _absent(self, room: Store, agreed: int) -> str:
        """Who is awaited, in words. Looks for the cards only where somebody came since."""
        if self.absent is None or self.absent[0] != agreed:
            names = ""
            if self.world_size <= SHOWN * SHOWN:
                cards = self._cards(room)
                absent = [rank for rank in range(self.world_size) if rank not in cards]
                names = f": {list_ranks(absent, '')}"
            number = self.world_size - agreed
            self.absent = agreed, f"{number} of {self.world_size} ranks{names}"
        return self.absent[1]


def _kinds(cards: Mapping[int, Mapping[str, Any]]) -> list[tuple[Any, list[int]]]:
    """What those who are there want: each kind of wants, and the ranks that want it."""
    kinds: dict[str, tuple[Any, list[int]]] = {}
    for rank, card in cards.items():
        _, ranks = kinds.setdefault(_as_text(card["wants"]), (card["wants"], []))
        ranks.append(rank)
    return list(kinds.values())


def _as_text(wants: Mapping[str, Any]) -> str:
    return json.dumps(wants, sort_keys=True)
