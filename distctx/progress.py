"""What a long wait says of itself: in the log, and on a terminal as a live line."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time

import attrs

__all__ = ["Progress"]

log = logging.getLogger("distctx")

#: Seconds after which a wait is reported; in the log then each time twice as long.
_REPORT_AFTER = 5.0
#: Seconds between two pictures of the live line.
_REDRAW = 1.0


@attrs.define(eq=False)
class Progress:
    """One wait. Whoever waits asks ``is_due`` at each turn, and then tells for what.

    Args:
        seconds: how long it may take.
    """

    seconds: float
    start: float = attrs.field(init=False, factory=time.monotonic)
    _log_at: float = attrs.field(init=False)
    _draw_at: float = attrs.field(init=False)
    _drawn: int = attrs.field(init=False, default=0)
    _closed: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._log_at = self.start + _REPORT_AFTER
        self._draw_at = self._log_at if _is_terminal() else float("inf")

    def is_due(self) -> bool:
        """Whether it is time to tell for what this wait is."""
        return time.monotonic() >= min(self._log_at, self._draw_at)

    def tell(self, whom: str, what_for: str, *, aloud: bool) -> None:
        """Say ``waiting for {whom} (20 s of 60 s) {what_for}``.

        Args:
            aloud: as a warning, and as the live line; one rank of the world speaks for all, since
                they may share a terminal. The others leave it at a line in the log.
        """
        now = time.monotonic()
        waited = now - self.start
        text = f"waiting for {whom} ({waited:.0f} s of {self.seconds:.0f} s) {what_for}"
        if now >= self._log_at:
            self._log_at = now + waited
            self._draw("")
            log.log(logging.WARNING if aloud else logging.INFO, "%s", text)
        if now >= self._draw_at:
            self._draw_at = now + _REDRAW
            self._draw(text if aloud else "")

    def close(self) -> None:
        """The wait is over: the terminal is as it was before."""
        self._draw("")
        self._closed = True

    def _draw(self, text: str) -> None:
        """Write ``text`` over the line that is there; "" takes it away."""
        if self._closed or not (text or self._drawn):
            return
        with contextlib.suppress(OSError, ValueError):  # the terminal has gone; nobody reads it
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            text = text[: columns - 1]
            sys.stderr.write("\r" + text.ljust(self._drawn) + ("" if text else "\r"))
            sys.stderr.flush()
            self._drawn = min(len(text), columns - 1)


def _is_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
