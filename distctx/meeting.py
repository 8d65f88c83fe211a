"""What came of a meeting, and what the ranks tell each other in its room afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from distctx.bounded import run_aside, run_bounded
from distctx.exceptions import RendezvousError
from distctx.stores import Store, peek

__all__ = ["Meeting"]

T = TypeVar("T")

#: Seconds for which a word to the others waits for the store.
_BOUND = 2.0


class Meeting(NamedTuple):
    """What came of it: all ranks are there and want the same.

    Attributes:
        token: a word of this meeting alone, the same on every rank.
        store: the room; each meeting's keys are apart from every other's.
        number: the room's; the next meeting's is likely the next.
        local: this rank's place among the ranks of its host, and how many they are; None where
            nobody asked.
    """

    token: str
    store: Store
    number: int
    local: tuple[int, int] | None = None

    def report_built(self) -> None:
        """This rank has built what the ranks met for. Does not wait until the store knows."""

        def report() -> None:
            with suppress(RuntimeError):  # the store has gone, and those who would read it
                self.store.add("built", 1)

        run_aside(report)

    def report_failure(self, rank: int, error: BaseException) -> None:
        """This rank could not build it. The others will know, when they fail for want of it."""
        text = f"rank {rank}: {type(error).__name__}: {error}"[:1000]
        self._if_it_answers(lambda: self.store.compare_set("failed", "", text))

    def not_built(self, what: str, error: Exception) -> RendezvousError:
        """The error for ranks that met and then could not build ``what`` with each other."""
        first = self._if_it_answers(lambda: peek(self.store, "failed"))
        why = (
            f"The first to fail was {first}"
            if first
            else "Mostly another rank has ended or hangs since they met; look there."
        )
        here = str(error).splitlines()[0]
        if "[127." in here + why:
            why += (
                " They connected over loopback, which gloo takes where a host's name resolves to "
                "it: if they are on several hosts, set GLOO_SOCKET_IFNAME to the interface between "
                "them."
            )
        return RendezvousError(
            f"All ranks met, but then {what} could not be made here: {here} {why}"
        )

    def _if_it_answers(self, request: Callable[[], T]) -> T | None:
        """What a request gives; None where the store has gone, or does not answer: then the words
        would reach nobody."""
        with suppress(RuntimeError, TimeoutError):
            return run_bounded(request, _BOUND)
        return None
