"""A rank that leaves with an error says so in the store; one that suffers another's asks there who.

gloo names no peer when one has gone, and NCCL seldom does. Nothing of this happens in a life that
ends well.
"""

from __future__ import annotations

import json
import os
import socket
import time
from bdb import BdbQuit

import attrs

from distctx.exceptions import (
    DistctxError,
    RankDisagreementError,
    RemoteRankError,
    RendezvousError,
    RendezvousTimeoutError,
)
from distctx.reports import blames_others, list_ranks, name_of
from distctx.stores import Store, await_key, backoff, peek, run_bounded, wait_for_count
from distctx.world import World

__all__ = ["Farewell"]

#: Seconds for which a rank waits for the store to take its word.
_ANSWER = 2.0
#: Seconds in which the others are expected to leave too, where one has failed.
_OTHERS = 2.0
#: Seconds that a rank takes to find out who has not left, or others wait for it to.
_REPORT = 2.0

#: How many ranks are named with host and pid.
_NAMED_IN_FULL = 4

#: Errors of distctx that come from other ranks. They name them already.
_NAMED = (RankDisagreementError, RemoteRankError, RendezvousError, RendezvousTimeoutError)


@attrs.define(eq=False, repr=False)
class Farewell:
    """What one rank says and asks when an error ends its world."""

    world: World
    store: Store
    error: BaseException

    #: Why the store did not take the word; empty where it did.
    lost: str = attrs.field(init=False, default="")

    @property
    def is_of_others(self) -> bool:
        """Whether this rank would have gone on, had another not failed."""
        if isinstance(self.error, DistctxError):
            return isinstance(self.error, _NAMED)
        text = str(self.error)
        return isinstance(self.error, RuntimeError) and (
            blames_others(type(self.error).__name__, text) or "timed out" in text.lower()
        )

    @property
    def asks(self) -> bool:
        """Whether its error leaves open which rank failed."""
        return self.is_of_others and not isinstance(self.error, DistctxError)

    @property
    def stays(self) -> bool:
        """Whether the others need this process to hear each other; not where a person ends it."""
        serves = self.world.rank == 0 and not self.world.environment.store_is_served
        return serves and isinstance(self.error, Exception) and not isinstance(self.error, BdbQuit)

    def tell(self) -> None:
        """Say that this rank leaves, before anything is closed. Waits for the store alone, at most
        2 s."""
        try:
            run_bounded(self._tell, _ANSWER)
        except TimeoutError:
            self.lost = f"does not answer within {_ANSWER:g} s"
        except RuntimeError:
            self.lost = "has ended, or cannot be reached"
        if self.lost:
            self.world.to_be_read.clear()  # nor would it answer whether all are through

    def ask(self) -> str:
        """Who failed, in words, or nothing. After this rank's groups are closed, so that those who
        wait for it fail as well; waits for them, at most 2 s, and again for who has looked."""
        if not (self.asks or self.stays):
            return ""
        if not self.lost:
            try:
                return run_bounded(self._ask, _OTHERS + 2 * _REPORT)
            except TimeoutError:
                self.lost = "does not answer"
            except RuntimeError:
                self.lost = "has ended, or cannot be reached"
        if not self.asks:
            return ""
        launched = self.world.environment.store_is_served
        return (
            f"The store at {self.world.place} {self.lost}. The process that serves it, "
            f"{'the launcher' if launched else 'mostly rank 0'}, has ended or is stopped, or the "
            "network to it is down."
        )

    def _tell(self) -> None:
        store, rank = self.store, self.world.rank
        lines = str(self.error).splitlines() or [""]
        card = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        word = json.dumps(
            card | {"error": f"{type(self.error).__name__}: {lines[0]}".rstrip(": ")[:300]}
        )
        if not self.is_of_others:
            store.compare_set("failed first", "", word)
        if self.asks:
            store.add("asking", 1)
        store.set(f"left/{rank}", "1")
        store.add("left", 1)

    def _ask(self) -> str:
        store, end = self.store, time.monotonic() + _OTHERS
        said = ""
        if self.asks:
            said = self._who_failed(end)
            store.add("heard", 1)
        if self.stays:
            wait_for_count(store, "left", self.world.world_size, end)
            wait_for_count(store, "heard", store.add("asking", 0), end + _REPORT)
        return said

    def _who_failed(self, end: float) -> str:
        store = self.store
        for pause in backoff(longest=0.1):
            if first := peek(store, "failed first"):
                card = json.loads(first)
                return f"Rank {card['rank']} ({name_of(card)}) failed first: {card['error']}"
            if store.add("left", 0) >= self.world.world_size or time.monotonic() > end:
                break
            time.sleep(pause)
        # One rank looks for all, since that is a request for each rank.
        mine = str(self.world.rank)
        if store.compare_set("looks", "", mine).decode() == mine:
            store.set("seen", self._who_stays())
        return await_key(store, "seen", _REPORT) or ""

    def _who_stays(self) -> str:
        store, ranks = self.store, range(self.world.world_size)
        stay = [rank for rank in ranks if peek(store, f"left/{rank}") is None]
        if not stay:
            return "No rank failed by itself: each lost, or waited for, another."
        names = list_ranks(stay)
        if len(stay) <= _NAMED_IN_FULL:
            cards = [json.loads(peek(store, f"rank/{rank}") or "null") for rank in stay]
            names = ", ".join(
                f"rank {rank}" + (f" ({name_of(card)})" if card else "")
                for rank, card in zip(stay, cards, strict=True)
            )
        each = (
            "it hangs or is busy, was killed, cannot be reached,"
            if len(stay) == 1
            else "they hang or are busy, were killed, cannot be reached,"
        )
        return (
            f"{_OTHERS:g} s after rank {self.world.rank} failed, {names} had not: {each} or left "
            "before without an error."
        )
