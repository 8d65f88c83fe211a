"""The ranks meet in the store before they build, so that nobody waits for someone who never comes.

Every start of a world, and every first touch of a mesh, is a *room*: a prefix in the store. Rank 0
opens a room under a fresh number kept in the store, the others follow the newest. A rank arrives
once, under its own key, and counts itself by what it wants; so one number tells whether all are
there and agree. A room is settled once, for all, by ``compare_set`` on its verdict: rank 0 says go
or disagree, and any rank may give up when its time is over. A settled room is never joined.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import attrs

from distctx.exceptions import DistctxError, RendezvousError, RendezvousTimeoutError
from distctx.reports import DISAGREE, GAVE_UP, SHOWN, TWICE, failure, list_ranks, name_of
from distctx.stores import PrefixStore, Store, backoff

__all__ = ["Meeting", "meet", "not_connected", "peek"]

log = logging.getLogger("distctx")

#: Seconds after which the main rank says for whom it waits; then each time twice as long.
_REPORT_AFTER = 5.0
#: Seconds given to the rest to arrive once some are known to disagree, so that all are told.
_GRACE = 0.5
#: Seconds that a rank stays until the others have read why a room failed.
_LINGER = 2.0
#: How far beyond its own world, as a factor, a rank looks for those that believe in a larger one.
_FARTHEST = 64

_GO = "go"

#: How a rank stands to the newest room: not in it; in it; kept out, since its rank is taken there.
_OUTSIDE, _INSIDE, _REFUSED = "outside", "inside", "refused"


class Meeting(NamedTuple):
    """What came of it: all ranks are there and want the same.

    Attributes:
        token: a word of this meeting alone, the same on every rank.
        store: the room; each meeting's keys are apart from every other's.
        local: this rank's place among the ranks of its host, and how many they are; None where
            nobody asked.
    """

    token: str
    store: Store
    local: tuple[int, int] | None = None

    def report_built(self) -> None:
        """This rank has built what the ranks met for."""
        self.store.add("built", 1)

    def wait_until_built(self, world_size: int, end: float) -> bool:
        """Whether all ranks have built it; waits for those that still do, until ``end``.

        A rank that destroys a group at once cuts off peers that are still connecting to each other:
        they fail with "connection closed by peer".
        """
        pauses = backoff(longest=0.1)
        while self.store.add("built", 0) < world_size:
            if time.monotonic() > end:
                return False
            time.sleep(next(pauses))
        return True


def peek(store: Store, key: str) -> str | None:
    """The value under ``key``, or None, in one request and without waiting.

    ``get`` waits for a key that is not there; ``compare_set`` answers with the value, or with what
    it was told to expect where there is none (and then sets nothing).
    """
    value = store.compare_set(key, "?", "?").decode()
    return None if value == "?" else value


def not_connected(what: str, error: Exception) -> RendezvousError:
    """The error for ranks that met and then could not build ``what`` with each other."""
    return RendezvousError(
        f"All ranks met, but then {what} could not be made here: {str(error).splitlines()[0]} "
        "Mostly another rank has ended or hangs since they met; look there for the first error."
    )


def _await(store: Store, key: str, bound: float) -> str | None:
    """The value under ``key``, waited for at most ``bound`` seconds; None where none came."""
    end = time.monotonic() + bound
    for pause in backoff(longest=0.1):
        if (value := peek(store, key)) is not None or time.monotonic() > end:
            return value
        time.sleep(pause)
    return None


def meet(
    store: Store,
    rank: int,
    world_size: int,
    wants: Mapping[str, Any],
    timeout: timedelta,
    *,
    place: str,
    purpose: str,
    need_local: bool = False,
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
        need_local: also find out which rank of its host this is.

    Raises:
        RankDisagreementError: all came, but do not want the same; raised on every rank.
        RendezvousTimeoutError: some did not come in time; raised on every rank that did.
        RendezvousError: two processes claim one rank, or the store is lost.
    """
    wants = {"world_size": world_size, **wants}
    guest = _Guest(store, rank, world_size, wants, timeout, place, purpose, need_local)
    try:
        return guest.open_room() if rank == 0 else guest.find_room()
    except DistctxError:
        raise
    except RuntimeError as error:
        raise RendezvousError(
            f"Rank {rank} lost the store at {place} while the ranks met {purpose}: "
            f"{str(error).splitlines()[0]}. The process that serves it, mostly rank 0 or the "
            "launcher, has ended; look there for the first error."
        ) from error


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
    need_local: bool

    start: float = attrs.field(init=False, factory=time.monotonic)
    card: str = attrs.field(init=False)
    want_key: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        digest = hashlib.sha256(json.dumps(self.wants, sort_keys=True).encode()).hexdigest()
        self.want_key = f"want/{digest[:16]}"
        card = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid()}
        self.card = json.dumps(card | {"wants": self.wants, "id": secrets.token_hex(8)})

    def open_room(self) -> Meeting:
        """Rank 0's way: open a room, wait until all are in it, settle it."""
        number = self.lobby.add("rooms", 1)
        room = self._room(number)
        self._arrive(room)
        disagreed_at = 0.0
        report_at = self.start + _REPORT_AFTER
        pauses = backoff()
        with self._withdrawing_if_interrupted(room):
            while True:
                if room.add(self.want_key, 0) >= self.world_size:
                    return self._settle(room, _GO)
                now = time.monotonic()
                # In this order: a rank counts what it wants before it counts itself.
                arrived = room.add("arrived", 0)
                if arrived > room.add(self.want_key, 0):
                    disagreed_at = disagreed_at or now
                    if arrived >= self.world_size or now > disagreed_at + _GRACE:
                        return self._settle(room, DISAGREE)
                if self.lobby.add("rooms", 0) != number:
                    # Another process opened the next one as rank 0. It is told, and so are all.
                    self._room(number + 1).set("twice", self.card)
                    raise self._rank_is_taken(self._room(number + 1))
                if peek(room, "twice"):
                    return self._settle(room, TWICE)
                if verdict := peek(room, "verdict"):
                    return self._obey(room, verdict)
                if self._left() <= 0:
                    return self._settle(room, GAVE_UP)
                if now >= report_at:
                    self._log_progress(room, arrived)
                    report_at = now + (now - self.start)
                self._sleep(next(pauses))

    def find_room(self) -> Meeting:
        """Every other rank's way: follow the newest room, arrive in it, wait for its verdict."""
        number, room, standing = 0, self._room(0), _OUTSIDE
        pauses = backoff()
        while True:
            newest = self.lobby.add("rooms", 0)
            if newest != number:
                if standing != _OUTSIDE and (verdict := peek(room, "verdict")):
                    return self._obey(room, verdict, standing)
                number, room, standing = newest, self._room(newest), _OUTSIDE
                if peek(room, "verdict") is None:
                    standing = _INSIDE if self._arrive(room) else _REFUSED
            with self._withdrawing_if_interrupted(room if standing == _INSIDE else None):
                if standing != _OUTSIDE and (verdict := peek(room, "verdict")):
                    return self._obey(room, verdict, standing)
                if self._left() <= 0:
                    if standing == _OUTSIDE:
                        raise self._not_let_in(room)
                    return self._settle(room, GAVE_UP if standing == _INSIDE else TWICE, standing)
                self._sleep(next(pauses))

    def _room(self, number: int) -> Store:
        return PrefixStore(str(number), self.lobby)

    def _left(self) -> float:
        """Seconds until this rank's time is over."""
        return self.start + self.timeout.total_seconds() - time.monotonic()

    def _sleep(self, pause: float) -> None:
        time.sleep(max(0.0, min(pause, self._left())))

    def _arrive(self, room: Store) -> bool:
        """Take this rank's place; False where another process has it, who is told of that."""
        if room.compare_set(f"rank/{self.rank}", "", self.card).decode() != self.card:
            room.set("twice", self.card)
            return False
        if self.need_local:
            room.set("need_local", "1")
        room.add(self.want_key, 1)
        room.add("arrived", 1)
        return True

    @contextmanager
    def _withdrawing_if_interrupted(self, room: Store | None) -> Iterator[None]:
        """Ctrl-C at a prompt: this rank has not come, and may come again to the same room's end."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            if room is not None:
                room.add(self.want_key, -1)
                room.add("arrived", -1)
                room.delete_key(f"rank/{self.rank}")
            raise

    # How it ends: one rank settles the room, the others obey.

    def _settle(self, room: Store, kind: str, standing: str = _INSIDE) -> Meeting:
        """Settle the room, unless somebody was faster; returns or raises what came of it."""
        verdict = f"{kind}/{secrets.token_hex(4)}"
        if kind == _GO and peek(room, "need_local"):
            self._number_by_host(room)
        said = room.compare_set("verdict", "", verdict).decode()
        if said == verdict and kind != _GO:
            room.set("report", json.dumps(self._look_around(room)))
        return self._obey(room, said, standing)

    def _obey(self, room: Store, verdict: str, standing: str = _INSIDE) -> Meeting:
        if standing == _REFUSED:
            raise self._rank_is_taken(room)
        kind, _, token = verdict.partition("/")
        if kind == _GO:
            local = peek(room, f"local/{self.rank}") if self.need_local else None
            return Meeting(token, room, tuple(json.loads(local)) if local else None)
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
        """Who has arrived, by rank. One request a rank, so only where it is needed."""
        cards: dict[int, dict[str, Any]] = {}
        arrived, end = room.add("arrived", 0), self.world_size
        rank = 0
        while rank < end:
            if text := peek(room, f"rank/{rank}"):
                cards[rank] = json.loads(text)
                # A rank that believes in a larger world may sit beyond this one's end.
                end = max(end, cards[rank]["wants"]["world_size"])
            rank += 1
            if rank == end and len(cards) < arrived and end < _FARTHEST * self.world_size:
                end *= 2
        return cards

    def _look_around(self, room: Store) -> dict[str, Any]:
        """What there is to tell about a meeting that failed, small enough for a store."""
        cards = self._cards(room)
        wants: dict[str, tuple[Any, list[int]]] = {}
        for rank, card in cards.items():
            wants.setdefault(json.dumps(card["wants"], sort_keys=True), (card["wants"], []))[
                1
            ].append(rank)
        twice = peek(room, "twice")
        return {
            "missing": [rank for rank in range(self.world_size) if rank not in cards],
            "guests": [[rank, name_of(card)] for rank, card in list(cards.items())[:SHOWN]],
            "arrived": len(cards),
            "wants": list(wants.values()),
            "twice": json.loads(twice) if twice else None,
            "seconds": round(self.timeout.total_seconds(), 3),
        }

    def _read_report(self, room: Store) -> dict[str, Any]:
        """Why the room failed; empty where the one who settled it did not live to say. Rank 0, who
        may serve the store, stays until all have read it."""
        text = _await(room, "report", _LINGER)
        room.add("read", 1)
        end = time.monotonic() + _LINGER
        if self.rank == 0:
            for pause in backoff(longest=0.1):
                if room.add("read", 0) >= room.add("arrived", 0) or time.monotonic() > end:
                    break
                time.sleep(pause)
        report: dict[str, Any] = json.loads(text) if text else {}
        return report

    def _rank_is_taken(self, room: Store) -> RendezvousError:
        other = _await(room, f"rank/{self.rank}", _GRACE)  # it may be just about to arrive
        who = name_of(json.loads(other)) if other else "another process"
        return RendezvousError(
            f"Two processes claim rank {self.rank} of {self.world_size} at {self.place}: "
            f"{who} and {name_of(json.loads(self.card))}. Give each process its own rank, and end "
            "what is left of an earlier run."
        )

    def _not_let_in(self, room: Store) -> DistctxError:
        """Time is over, and no room was open to this rank: rank 0 opens them."""
        verdict = peek(room, "verdict") or ""
        late = (
            " The others met there before and gave up; this rank came too late."
            if verdict.startswith(GAVE_UP)
            else ""
        )
        seconds = self.timeout.total_seconds()
        return RendezvousTimeoutError(
            f"Rank 0 did not come {self.purpose} within {seconds:g} s at {self.place}; without it "
            f"nothing is known of the other ranks.{late} Check that rank 0 was started, is alive, "
            "and reaches this line of the program too; a longer wait is rendezvous_timeout=.",
            missing_ranks=(0,),
        )

    def _log_progress(self, room: Store, arrived: int) -> None:
        absent = ""
        if self.world_size <= SHOWN * SHOWN:
            cards = self._cards(room)
            absent = ": " + list_ranks([r for r in range(self.world_size) if r not in cards], "")
        log.warning(
            "waiting %s for %d of %d ranks%s (%.0f s of %.0f s)",
            self.purpose,
            self.world_size - arrived,
            self.world_size,
            absent,
            time.monotonic() - self.start,
            self.timeout.total_seconds(),
        )
