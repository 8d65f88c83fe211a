"""One line on each rank: what happened, when, and where it stood; those alike are folded."""

from __future__ import annotations

import linecache
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from distctx.reports import blames_others, list_ranks
from distctx.testing.watch import Story
from distctx.traces import frames_of, is_foreign, is_pytest, is_torch, shown, stand

__all__ = ["Row", "in_order_of_guilt", "rows_of", "table"]

#: What differs between ranks that failed alike.
_PRIVATE = re.compile(r"\[?\d+(?:\.\d+){3}\]?:\d+|0x[0-9a-f]+|(?<=pid )\d+|rank-\d+", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")

#: Characters of a message that a row shows.
_WIDTH = 240


@attrs.frozen
class Row:
    """One rank's part in the verdict."""

    rank: int
    #: ``passed``, ``skipped``, ``xfailed``, ``xpassed``, ``failed``, ``crashed``, ``hung``,
    #: ``left`` (something behind), ``ended`` (with the run, by ``pytest.exit``).
    what: str
    #: The phase: ``setup``, ``call`` or ``teardown``.
    when: str
    #: Seconds since the test began, or None.
    at: float | None
    #: The error, the reason, or why it was stopped.
    text: str = ""
    #: The last line outside torch, as ``path:line``.
    where: str = ""
    #: Whether it would have gone well, had no other rank failed.
    consequence: bool = False
    #: Whether it stood outside torch, so that it did not wait for others there.
    outside: bool = False
    #: Whether it is known to have failed before all others.
    was_first: bool = False
    #: The type of the error.
    raised: str = ""
    #: The rank's own report of its failure, as JSON.
    report: Mapping[str, Any] | None = None
    stacks: str = ""

    @property
    def went_wrong(self) -> bool:
        """Whether this alone fails the test."""
        return self.what in ("failed", "crashed", "hung", "left")

    def alike(self) -> tuple[Any, ...]:
        """Equal for ranks that fared alike."""
        differs = _NUMBER if self.consequence else _PRIVATE
        return self.what, self.when, differs.sub("", self.text), self.where, self.consequence


def rows_of(stories: Sequence[Story], folder: Path) -> list[Row]:
    """A row for each rank; paths are shown from ``folder``."""
    starts = [event["at"] for story in stories if (event := story.event("start"))]
    began = min(starts, default=None)
    rows = [_Reader(story, began, folder).row() for story in stories]
    blame = [_blames_others(row) for row in rows]
    if all(blame):  # there is no rank to blame
        return rows
    return [
        attrs.evolve(row, consequence=row.consequence or blames)
        for row, blames in zip(rows, blame, strict=True)
    ]


def _blames_others(row: Row) -> bool:
    """Whether a failure speaks of another rank that has gone."""
    return row.what == "failed" and (
        row.raised == "RemoteRankError" or blames_others(row.raised, row.text)
    )


def in_order_of_guilt(rows: Sequence[Row]) -> list[Row]:
    """Those that went wrong: the first that failed by itself, in time, leads.

    Of ranks that hang, one that stands outside torch keeps those waiting that stand in it; else the
    ones in the smaller company have gone astray.
    """
    wrong = [row for row in rows if row.went_wrong]
    company = [row.where for row in wrong]

    def guilt(row: Row) -> tuple[Any, ...]:
        if row.what in ("failed", "crashed"):
            return (2 if row.consequence else 0), not row.was_first, row.at or 0.0, row.rank
        if row.what == "hung":
            place = 3 if row.consequence else 1
            return place, not row.outside, company.count(row.where), row.rank
        return 4, 0.0, row.rank

    return sorted(wrong, key=guilt)


def _folded(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that are alike, together, in the order of the first of each."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.alike(), []).append(row)
    return list(groups.values())


def table(rows: Sequence[Row]) -> str:
    """All rows, folded, those that went wrong first."""
    wrong = in_order_of_guilt(rows)
    lines = [
        _cells(group) for group in _folded([*wrong, *(row for row in rows if row not in wrong)])
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]
        ).rstrip()
        for line in lines
    )


def _cells(group: list[Row]) -> list[str]:
    row = group[0]
    what = {"left": "left something behind", "hung": "was stopped", "crashed": "crashed"}.get(
        row.what, row.what
    )
    phase = f" in {row.when}" if row.went_wrong and row.what != "left" else ""
    times = sorted(row.at for row in group if row.at is not None)
    when = f"{times[0]:.2f} s" if times else ""
    if times and f"{times[0]:.2f}" != f"{times[-1]:.2f}":
        when = f"{times[0]:.2f} to {times[-1]:.2f} s"
    text = " ".join(row.text.split())
    width = _WIDTH // 2 if row.consequence else _WIDTH
    if len(text) > width:
        text = text[: width - 2] + " …"
    if row.consequence:
        text = f"a consequence: {text}"
    if row.where:
        text += f"; at {row.where}"
    ranks = list_ranks(sorted(row.rank for row in group))
    return [ranks, what + phase, when, text]


class _Reader:
    """Reads one rank's story."""

    def __init__(self, story: Story, began: float | None, folder: Path) -> None:
        self.story, self.began, self.folder = story, began, folder
        stopped = story.event("stopped")
        self.phases = [
            report["when"]
            for report in story.reports()
            if stopped is None or report["at"] < stopped["at"]
        ]

    def row(self) -> Row:
        story = self.story
        failed = next((report for report in story.reports() if report["failed"]), None)
        if failed is not None:
            return self._failed(failed)
        if story.run_ended_by is not None and (story.event("stop") or not story.event("end")):
            text = f"rank {story.run_ended_by} ended the run"
            return Row(story.rank, "ended", self._phase(), self._since(story.ended), text)
        if story.stopped is not None:
            where, outside = self._stood(story.stacks)
            return Row(
                story.rank, "hung", self._phase(), self._since(story.ended), story.stopped, where,
                story.consequence_of is not None, outside, stacks=_shortened(story.stacks),
            )  # fmt: skip
        end = story.event("end")
        if end is None or story.status:
            absent = story.event("absent")
            text = absent["text"] if absent else _way_to_die(story.status)
            fatal = re.match(r"Fatal Python error: (.*)", story.stacks)
            text += f" ({fatal[1].lower()})" if fatal else ""
            where, _ = self._stood(story.stacks)
            return Row(
                story.rank, "crashed", self._phase(), self._since(story.ended), text, where,
                stacks=_shortened(story.stacks),
            )  # fmt: skip
        if end["left"]:
            text = "; ".join(end["left"])
            return Row(story.rank, "left", "teardown", self._since(end["at"]), text)
        return self._well(end)

    def _phase(self) -> str:
        """The phase in which the rank was when it told its last."""
        return "setup" if not self.phases else "call" if self.phases == ["setup"] else "teardown"

    def _since(self, at: float | None) -> float | None:
        return None if at is None or self.began is None else max(0.0, at - self.began)

    def _failed(self, failed: dict[str, Any]) -> Row:
        longrepr = failed["report"]["longrepr"]
        where = ""
        if isinstance(longrepr, dict):
            crash = longrepr["reprcrash"] or {"path": "", "lineno": 0, "message": "it failed"}
            text, where = crash["message"], self._last_line(longrepr)
        else:
            text = str(longrepr)
        text = text.strip().partition("\n")[0]
        text = (
            text
            if not failed["raised"] or failed["raised"] in text
            else f"{failed['raised']}: {text}"
        )
        if self.story.stopped is not None:
            text += f" (and then was stopped in {self._phase()}: {self.story.stopped})"
        return Row(
            self.story.rank, "failed", failed["when"], self._since(failed["at"]), text, where,
            was_first=self.story.was_first,
            raised=failed["raised"] or "", report=failed["report"],
            stacks=_shortened(self.story.stacks),
        )  # fmt: skip

    def _well(self, end: dict[str, Any]) -> Row:
        reports = self.story.reports()
        telling = next((r for r in reports if r["outcome"] != "passed" or r["xfail"]), None)
        what, text = "passed", ""
        if telling is not None:
            what = telling["outcome"]
            longrepr = telling["report"]["longrepr"]
            text = str(longrepr[2] if isinstance(longrepr, list | tuple) else "")
            if telling["xfail"]:
                what = "xfailed" if telling["outcome"] == "skipped" else "xpassed"
                text = telling["report"].get("wasxfail", "")
        return Row(self.story.rank, what, "call", self._since(end["at"]), text)

    def _last_line(self, longrepr: Mapping[str, Any]) -> str:
        """The innermost line of a traceback that is neither torch's nor Python's."""
        entries = longrepr["reprtraceback"]["reprentries"]
        found = [
            place
            for entry in entries
            if (place := (entry["data"].get("reprfileloc") or {})) and "path" in place
        ]
        for place in reversed(found):
            if not is_foreign(os.path.join(self.folder, place["path"])):
                return f"{place['path']}:{place['lineno']}"
        crash = longrepr["reprcrash"]
        return f"{shown(crash['path'], self.folder)}:{crash['lineno']}" if crash else ""

    def _stood(self, stacks: str) -> tuple[str, bool]:
        """The main thread's last line outside torch, and whether it stood there itself."""
        frame, inner = stand(stacks)
        if frame is None:
            return "", not inner
        line = linecache.getline(frame.path, frame.line).strip()
        where = f"{shown(frame.path, self.folder)}:{frame.line} in {frame.name}: {line}".rstrip(
            ": "
        )
        return where, not any(is_torch(each.path) for each in inner)


def _shortened(stacks: str) -> str:
    """Without what stands below each test: pytest's frames are the same for all."""
    blocks = []
    for block in stacks.strip().split("\n\n"):
        lines = block.splitlines()
        paths = [(i, frame.path) for i, line in enumerate(lines) for frame in frames_of(line)]
        users = [i for i, path in paths if not is_foreign(path)]
        below = [i for i, path in paths if is_pytest(path) and users and i > users[0]]
        if not block.startswith("Extension modules"):
            blocks.append("\n".join(lines[: below[0]] if below else lines))
    return "\n\n".join(blocks)


def _way_to_die(status: int | None) -> str:
    if status is None:
        return "it did not end when it was killed"
    if status >= 0:
        return f"exited with status {status} in the middle of the test"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}"
