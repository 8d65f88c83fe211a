"""What a rank tells of its test: a file of lines, which outlives a rank that is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import monotonic  # bound here, since tests replace time.monotonic
from typing import Any

__all__ = ["Folder", "Journal", "as_json"]


def as_json(value: Any) -> str:
    """As JSON; what it has no words for, as Python shows it."""
    try:
        return json.dumps(value, default=repr)
    except (TypeError, ValueError):  # a key that is no string, a thing in itself
        return json.dumps(_plain(value, 0), default=repr)


def _plain(value: Any, depth: int) -> Any:
    if depth > 50:
        return "…"
    if isinstance(value, dict):
        return {str(key): _plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    return value


class Journal:
    """The rank's side: one line, at once, for each thing that happens.

    A child that a test forks, and that comes back from the test, has nothing to tell.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._pid = os.getpid()

    def tell(self, event: str, **what: Any) -> None:
        """Write it down, with the time."""
        if os.getpid() == self._pid:
            self._file.write(as_json({"event": event, "at": monotonic()} | what) + "\n")
            self._file.flush()


class Folder:
    """The files of one test: a journal, a place for stacks and for output, by rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[int, int] = {}

    def journal(self, rank: int) -> Path:
        """What the rank tells."""
        return self.path / f"rank-{rank}.jsonl"

    def stacks(self, rank: int) -> Path:
        """Where the rank's threads stand, when it is asked or when it crashes."""
        return self.path / f"rank-{rank}.stacks"

    def output(self, rank: int, stream: str) -> Path:
        """What a rank that crashed had written to ``stdout`` or ``stderr`` in its last phase."""
        return self.path / f"rank-{rank}.{stream}"

    def news(self, rank: int) -> list[dict[str, Any]]:
        """What the rank has told since the last time; whole lines only."""
        try:
            with self.journal(rank).open("rb") as file:
                file.seek(self._read.get(rank, 0))
                text = file.read()
        except FileNotFoundError:
            return []
        whole, _, _ = text.rpartition(b"\n")
        if whole:
            self._read[rank] = self._read.get(rank, 0) + len(whole) + 1
        return [json.loads(line) for line in whole.splitlines()]

    def text(self, path: Path) -> str:
        """The text of one of the files; none where it is not there."""
        try:
            return path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return ""
