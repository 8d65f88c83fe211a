"""A rank that fails says so in the store; one that fails because of another asks there which.

gloo names no peer when one has gone, and NCCL seldom does. Nothing of this happens in a life that
ends well.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from bdb import BdbQuit
from collections.abc import Iterator

import attrs

from distctx.bounded import run_bounded
from distctx.exceptions import RankDisagreementError, RemoteRankError, RendezvousError
from distctx.reports import blames_others, list_ranks, name_of
from distctx.stores import Store, await_key, backoff, discard, peek, wait_for_count
from distctx.world import World

__all__ = ["Farewell"]

log = logging.getLogger("distctx")

#: Seconds for which a rank waits for the store to take its word.
_ANSWER = 2.0
#: Seconds in which the others are expected to fail too, where one has.
_OTHERS = 2.0
#: Seconds in which those who ask are expected to have heard, after that.
_HEAR = 1.5
#: Seconds that asking, and staying for those who ask, may take in all.
_BOUND = 4.0
#: How many ranks are named with host and pid.
_NAMED_IN_FULL = 4
#: How many ranks share a counter whose bits say which of them have failed; it has 63 bits.
_BITS = 62


@attrs.define(eq=False, repr=False)
class Farewell:
    """What one rank says and asks when an error ends its world."""

    world: World
    store: Store
    error: BaseException

    #: Why nothing more can be asked; empty where it can.
    lost: str = attrs.field(init=False, default="")

    @property
    def is_of_others(self) -> bool:
        """Whether this rank would have gone on, had another not failed."""
        return any(
            isinstance(error, (RendezvousError, RemoteRankError))
            or blames_others(type(error).__name__, _text(error))
            for error in _chain(self.error)
        )

    @property
    def asks(self) -> bool:
        """Whether its error leaves open which rank failed, or why."""
        complete = (RankDisagreementError, RemoteRankError)
        return self.is_of_others and not isinstance(self.error, complete)

    @property
    def lingers(self) -> bool:
        """Whether the others need this process to hear each other; not where a person ends it."""
        serves = self.world.rank == 0 and self.world.server in ("rank 0", "its maker")
        is_by_hand = isinstance(self.error, (KeyboardInterrupt, BdbQuit))
        return serves and not is_by_hand

    def tell(self) -> None:
        """Say that this rank fails, before anything is closed. Waits for the store alone, at most
        2 s."""
        try:
            run_bounded(self._tell, _ANSWER)
        except TimeoutError:
            self._lose(f"does not answer within {_ANSWER:g} s")
        except RuntimeError:
            self._lose("is lost")

    def ask(self) -> str:
        """Who failed, in words, or nothing. After this rank's groups are closed, so that those who
        wait for it fail as well. Waits for them, and for who has looked, at most 4 s."""
        if not self.lost and (self.asks or self.lingers):
            try:
                return run_bounded(self._ask, _BOUND)
            except TimeoutError:
                return ""
            except RuntimeError:
                self._lose("is lost")
        if not self.lost or not self.asks:
            return ""
        server = self.world.server
        who = f", which {server} serves," if server else ""
        return (
            f"The store at {self.world.place}{who} {self.lost}: {server or 'what serves it'} was "
            "ended or stopped, or the network to it is down."
        )

    def _lose(self, why: str) -> None:
        self.lost = why
        self.world.to_be_read.clear()  # nor could it be asked whether all are through
        discard(self.store)

    def _tell(self) -> None:
        store, rank = self.store, self.world.rank
        if not self.is_of_others:
            card = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
            word = json.dumps(card | {"error": _summary(self.error)})
            store.compare_set("end/failed first", "", word)
        if self.asks:
            store.add("end/asking", 1)
        store.add(f"end/failed/{rank // _BITS}", 1 << rank % _BITS)
        store.add("end/failed", 1)

    def _ask(self) -> str:
        store, end = self.store, time.monotonic() + _OTHERS
        said = ""
        if self.asks:
            said = self._who_failed(end)
            store.add("end/heard", 1)
        if self.lingers:
            wait_for_count(store, "end/failed", self.world.world_size, end)
            wait_for_count(store, "end/heard", store.add("end/asking", 0), end + _HEAR)
        return said

    def _who_failed(self, end: float) -> str:
        store, is_first, failed = self.store, True, 0
        # Where many ask, each asks less often.
        for pause in backoff(longest=max(0.05, self.world.world_size / 20_000)):
            failed = store.add("end/failed", 0)  # before the look, since each says its error first
            if first := peek(store, "end/failed first"):
                card = json.loads(first)
                return f"Rank {card['rank']} ({name_of(card)}) failed first: {card['error']}"
            if failed >= self.world.world_size:
                return "No rank failed by itself: each lost, or waited for, another."
            if getattr(self.error, "missing_ranks", ()):  # the error says who
                return ""
            if time.monotonic() > end:
                break
            if is_first:  # a launcher may end this process at once, where another was killed
                is_first = False
                log.error(
                    "rank %d has this error, and asks for at most %g s which rank is at fault",
                    self.world.rank, _OTHERS, exc_info=self.error,
                )  # fmt: skip
            time.sleep(pause)
        # One rank looks for all that ask when so many have failed.
        mine = str(self.world.rank)
        if store.compare_set(f"end/looks/{failed}", "", mine).decode() == mine:
            store.set(f"end/seen/{failed}", self._who_has_not_failed())
        return await_key(store, f"end/seen/{failed}", 1.0) or ""

    def _who_has_not_failed(self) -> str:
        store, world_size = self.store, self.world.world_size
        bits = [store.add(f"end/failed/{part}", 0) for part in range((world_size - 1) // _BITS + 1)]
        ranks = [rank for rank in range(world_size) if not bits[rank // _BITS] >> rank % _BITS & 1]
        names = list_ranks(ranks)
        if len(ranks) <= _NAMED_IN_FULL:
            cards = [json.loads(peek(store, f"rank/{rank}") or "null") for rank in ranks]
            names = ", ".join(
                f"rank {rank}" + (f" ({name_of(card)})" if card else "")
                for rank, card in zip(ranks, cards, strict=True)
            )
        each = (
            "it hangs or is busy, was killed, cannot be reached,"
            if len(ranks) == 1
            else "they hang or are busy, were killed, cannot be reached,"
        )
        return (
            f"{_OTHERS:g} s after rank {self.world.rank} had failed, {names} had not: {each} or "
            "ended without an error before."
        )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it; not those of an earlier life."""
    seen: list[BaseException] = []
    while error is not None and not any(error is one for one in seen):
        if seen and any("[distctx]" in note for note in getattr(error, "__notes__", ())):
            return
        yield error
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _summary(error: BaseException) -> str:
    lines = _text(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")[:300]
