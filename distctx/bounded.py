"""Calls that may never return, in threads of their own: waited for within a bound, or not at all.

A thread that is through waits a while for the next call, since to start one costs more than most
calls. The pools of the standard library are joined when the interpreter ends, which a call that
never returns would hold up for ever.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar, cast

__all__ = ["run_aside", "run_bounded"]

T = TypeVar("T")

#: Where a thread finds its next call.
_Inbox: TypeAlias = "queue.SimpleQueue[Callable[[], object]]"

#: Seconds for which a thread that is through waits for the next call.
_IDLE = 0.5
#: Seconds that a call has to come to an end once it is told to.
_GRACE = 1.0

#: The inboxes of those threads that wait for a call. Who takes one out owes it a call.
_idle: list[_Inbox] = []
os.register_at_fork(after_in_child=_idle.clear)  # a child has no threads


def run_aside(call: Callable[[], object]) -> None:
    """Run ``call`` and wait for nothing. It must not raise: nobody would see it."""
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), name="distctx-call", daemon=True).start()
    inbox.put(call)


def run_bounded(
    call: Callable[[], T], seconds: float, cancel: Callable[[], None] | None = None
) -> T:
    """What ``call`` returns or raises; TimeoutError where it is not through after ``seconds``.

    A request to a store whose server is stopped, or unreachable, waits for ever inside torch, and
    deaf to signals; so do torch's constructors for several times their timeout. So ``call`` runs in
    a thread, and this one waits for it, open to Ctrl-C. A thread that is given up is left behind:
    nothing can end it.

    Args:
        cancel: called where the wait is interrupted; ``call`` then has a second to come to an end.
    """
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    run_aside(run)
    end = time.monotonic() + seconds
    try:
        while True:
            with contextlib.suppress(queue.Empty):
                value, error = results.get(timeout=0.1)
                break
            if time.monotonic() > end:
                raise TimeoutError(f"no answer within {seconds:g} s")
    except BaseException:
        if cancel is not None:
            cancel()
            with contextlib.suppress(queue.Empty):
                results.get(timeout=_GRACE)
        raise
    if error is not None:
        raise error
    return cast("T", value)


def _serve(inbox: _Inbox) -> None:
    """One thread: call after call, until none comes."""
    while True:
        try:
            call = inbox.get(timeout=_IDLE)
        except queue.Empty:
            try:
                _idle.remove(inbox)
            except ValueError:  # somebody took it just now, and the call is on its way
                continue
            return
        call()
        del call  # it holds what it returned, which may be the last reference to a group
        _idle.append(inbox)
