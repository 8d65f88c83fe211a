"""What a rank tells of its test: a file of lines, which outlives a rank that is killed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

__all__ = ["Folder", "Journal"]


class Journal:
    """The rank's side: one line, at once, for each thing that happens."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def tell(self, event: str, **what: Any) -> None:
        """Write it down, with the time."""
        line = {"event": event, "at": time.monotonic()} | what
        self._file.write(json.dumps(line, default=repr) + "\n")
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
