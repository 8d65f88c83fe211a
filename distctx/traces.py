"""What faulthandler writes of a process, read: frames, the main thread, the last line outside
torch."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "Frame",
    "Stand",
    "frames_of",
    "is_foreign",
    "is_pytest",
    "is_torch",
    "process_state",
    "shown",
    "stand",
]

_FRAME = re.compile(r'^\s+File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Frame(NamedTuple):
    """One call."""

    path: str
    line: int
    name: str


class Stand(NamedTuple):
    """Where a process stands.

    Attributes:
        frame: the main thread's last line outside torch, or None.
        inner: the frames called from there, the innermost first.
    """

    frame: Frame | None
    inner: tuple[Frame, ...]


def frames_of(stack: str) -> list[Frame]:
    """The frames of one thread, the innermost first."""
    return [Frame(path, int(line), name) for path, line, name in _FRAME.findall(stack)]


def stand(stacks: str) -> Stand:
    """Where the main thread stood, or the one that crashed."""
    blocks = [block for block in stacks.split("\n\n") if "(most recent call first)" in block]
    crashed = [block for block in blocks if block.startswith("Current thread")]
    # The main thread comes last. The current one is another only where that one crashed, or
    # happened to be the one that took the signal: then it is not Python's own.
    fatal = stacks.startswith("Fatal")
    frames = frames_of(((crashed if fatal else blocks) or blocks or [""])[-1])
    for depth, frame in enumerate(frames):
        if not is_foreign(frame.path):
            return Stand(frame, tuple(frames[:depth]))
    return Stand(None, tuple(frames))


def shown(path: str, folder: str | Path | None = None) -> str:
    """A path as people read it: from ``folder`` (None: the current one) where it is inside."""
    inside = os.path.relpath(path, folder)
    return path if inside.startswith("..") else inside


@functools.cache
def _home(module: str) -> str:
    spec = importlib.util.find_spec(module)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return os.path.join(places[0], "") if places else "\0"


def is_torch(path: str) -> bool:
    """Whether a file is torch's or distctx's."""
    return os.path.realpath(path).startswith((_home("torch"), _home("distctx")))


def is_pytest(path: str) -> bool:
    """Whether a file is pytest's."""
    return os.path.realpath(path).startswith((_home("_pytest"), _home("pluggy")))


def is_foreign(path: str) -> bool:
    """Whether a file is torch's, distctx's, pytest's or Python's own."""
    path = os.path.realpath(path)
    if is_torch(path) or is_pytest(path) or os.path.basename(path).startswith("<"):
        return True
    python = os.path.join(sysconfig.get_paths()["stdlib"], "")
    return path.startswith(python) and "-packages" not in path


def process_state(pid: int) -> str:
    """The state of a process as the system knows it, such as ``T (stopped)``; empty where it has
    ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
    found = re.search(r"State:\s+(.*)", status)
    return found[1] if found else "unknown"
