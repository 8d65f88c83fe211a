"""A gate before the processors, so that the workers of pytest-xdist do not crowd the machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["places"]


@contextlib.contextmanager
def places(folder: Path | None, wanted: int) -> Iterator[None]:
    """Hold as many of this machine's processors as there are ranks, or all of them.

    Files in ``folder`` stand for processors; who holds a file's lock has the processor, and loses
    it with its life. Waits while tests of other workers hold them, which their own clocks bound.
    """
    if folder is None:
        yield
        return
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    else:
        processors = os.cpu_count() or 1
    with contextlib.ExitStack() as held:
        files = [
            held.enter_context((folder / f"processor-{number}").open("w"))
            for number in range(processors)
        ]
        with (folder / "gate").open("w") as gate:
            _lock(gate)  # one takes at a time, so no two wait for each other
            missing = min(wanted, processors)
            while missing:
                taken = [file for file in files[:missing] if _lock(file, wait=False)]
                missing -= len(taken)
                files = [file for file in files if file not in taken]
                files = files[1:] + files[:1]  # where nobody took the first, the next may be free
                time.sleep(0 if taken else 0.005)
        yield


def _lock(file: IO[str], *, wait: bool = True) -> bool:
    import fcntl  # not there on Windows, which has no ranks to be forked

    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
