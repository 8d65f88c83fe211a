"""What ranks tell of one test, made into one test's reports."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from distctx.reports import list_ranks
from distctx.testing.rows import Row, in_order_of_guilt, rows_of, table
from distctx.testing.watch import Story

__all__ = ["failure_here", "reports_of"]

#: How many stacks, and how many further tracebacks, a report shows.
_SHOWN = 8


def reports_of(
    item: pytest.Item, stories: Sequence[Story], notes: Sequence[str] = ()
) -> list[pytest.TestReport]:
    """The reports of setup, call and teardown that all ranks together deserve.

    Args:
        notes: what else a reader of a failure should know.
    """
    return _Verdict(item, stories, notes).reports()


def failure_here(item: pytest.Item, when: str, text: str) -> pytest.TestReport:
    """A report of a failure that is no exception of a rank's own."""

    def fail() -> None:
        pytest.fail(text, pytrace=False)

    call = pytest.CallInfo.from_call(fail, when=when)  # type: ignore[arg-type]
    report = pytest.TestReport.from_item_and_call(item, call)
    if not hasattr(report.longrepr, "addsection"):  # the item shows all its failures alike
        report.longrepr = text
    return report


class _Verdict:
    def __init__(self, item: pytest.Item, stories: Sequence[Story], notes: Sequence[str]) -> None:
        self.item, self.stories, self.notes = item, stories, notes
        self.rows = rows_of(stories, item.config.invocation_params.dir)

    def reports(self) -> list[pytest.TestReport]:
        wrong = in_order_of_guilt(self.rows)
        rest = [row for row in self.rows if not row.went_wrong]
        expected = [row for row in rest if row.what == "xfailed"]
        if expected and all(row.consequence or row.what == "xfailed" for row in self.rows):
            first = min(expected, key=lambda row: row.at or 0.0)
            return self._alike(self.stories[first.rank])  # the others only waited for it
        if wrong:
            return self._failed(wrong[0])
        if any(row.what == "ended" for row in self.rows):
            return []  # as of a test in one process that ends the run
        if len({row.what for row in self.rows}) > 1:
            kinds = ", ".join(
                f"{list_ranks([row.rank for row in self.rows if row.what == what])} {what}"
                for what in dict.fromkeys(row.what for row in self.rows)
            )
            failed = failure_here(self.item, "call", f"The ranks disagree: {kinds}.")
            return self._around(failed, self.stories[0])
        return self._alike(self.stories[0])

    def _alike(self, story: Story) -> list[pytest.TestReport]:
        """All ranks fared as this one, so its reports are the test's, with the output of all."""
        reports = []
        for event in story.reports():
            if event["when"] == "call":
                reports += self._subtests(story)
            report = self._report(event["report"])
            same = [
                other["report"]
                for each in self.stories
                for other in each.reports()
                if other["when"] == report.when
            ]
            report.duration = max(other["duration"] for other in same)
            report.sections = self._output(report.when)
            reports.append(report)
        return reports

    def _failed(self, row: Row) -> list[pytest.TestReport]:
        """The row's own failure leads."""
        story = self.stories[row.rank]
        heading = self._heading(row)
        if row.report is not None and isinstance(row.report["longrepr"], dict):
            failed = self._report(_annotated(row.report, row.rank, heading))
        else:
            text = heading
            if row.report is not None:
                text += f"\n{row.report['longrepr']}"
            elif row.stacks.strip() and row.what == "crashed":
                text += f"\n\n{row.stacks.strip()}"
            when = "call" if row.what == "left" else row.when
            failed = failure_here(self.item, when, text)
        return self._around(failed, story)

    def _heading(self, row: Row) -> str:
        size = len(self.rows)
        if row.what == "left":
            same = [other.rank for other in self.rows if other.alike() == row.alike()]
            return f"{list_ranks(same).capitalize()} of {size} left behind: {row.text}"
        at = "" if row.at is None else f" after {row.at:.2f} s"
        who = f"Rank {row.rank} of {size}"
        if row.what == "hung":
            stood = f"; it stood at {row.where}" if row.where else ""
            return f"{who} did not end, in {row.when}: {row.text}{stood}"
        if row.what == "crashed":
            stood = f"; it stood at {row.where}" if row.where else ""
            return f"{who} {row.text}, in {row.when}{at}{stood}"
        first = "failed first" if size > 1 else "failed"
        gone = [other.rank for other in self.rows if not other.went_wrong]
        why = f" {list_ranks(gone).capitalize()} had ended before." if row.consequence else ""
        return f"{who} {first}, in {row.when}{at}:{why}"

    def _around(self, failed: pytest.TestReport, story: Story) -> list[pytest.TestReport]:
        """Complete a failure: what came before and after it, the table, the stacks, the output."""
        for name, content in self._sections():
            if (add := getattr(failed.longrepr, "addsection", None)) is not None:
                add(name, content)
            else:
                failed.longrepr = f"{failed.longrepr}\n--- {name} ---\n{content}"
        failed.sections = self._output(None)
        before = {"setup": [], "call": ["setup"], "teardown": ["setup", "call"]}[str(failed.when)]
        reports = [self._told(story, when) or self._passed(when) for when in before]
        reports += self._subtests(story)
        reports.append(failed)
        if failed.when != "teardown":
            after = self._told(story, "teardown")
            own = after is not None and (after.passed or after.failed)
            reports.append(after if after is not None and own else self._passed("teardown"))
        return reports

    def _subtests(self, story: Story) -> list[pytest.TestReport]:
        """What the rank logged itself, of parts of the test."""
        return [self._report(e["report"]) for e in story.events if e["event"] == "subtest"]

    def _told(self, story: Story, when: str) -> pytest.TestReport | None:
        """The rank's own report of a phase."""
        for event in story.reports():
            if event["when"] == when and (event["outcome"] == "passed" or when == "teardown"):
                return self._report(event["report"])
        return None

    def _passed(self, when: str) -> pytest.TestReport:
        return pytest.TestReport(
            nodeid=self.item.nodeid,
            location=self.item.location,
            keywords=dict.fromkeys(self.item.keywords, 1),
            outcome="passed",
            longrepr=None,
            when=when,  # type: ignore[arg-type]
        )

    def _report(self, as_json: Mapping[str, Any]) -> pytest.TestReport:
        config = self.item.config
        data = {key: _with_tuples(key, value) for key, value in as_json.items()}
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        return cast(pytest.TestReport, report)

    def _sections(self) -> list[tuple[str, str]]:
        sections = [("ranks", table(self.rows))]
        wrong = in_order_of_guilt(self.rows)
        traces: dict[str, list[Row]] = {}
        for row in wrong[1:]:
            if row.report is not None and not row.consequence and row.where != wrong[0].where:
                traces.setdefault(row.where, []).append(row)
        for rows in list(traces.values())[:_SHOWN]:
            text = str(self._report(rows[0].report or {}).longrepr)
            sections.append((f"{list_ranks([row.rank for row in rows])} failed too", text))
        stacks: dict[str, list[Row]] = {}
        for row in wrong:
            if row.stacks.strip() and not (row is wrong[0] and row.what == "crashed"):
                stacks.setdefault(re.sub(r"0x[0-9a-f]+", "", row.stacks), []).append(row)
        for rows in list(stacks.values())[:_SHOWN]:
            named = f"where {list_ranks([row.rank for row in rows])} stood"
            sections.append((named, rows[0].stacks.strip()))
        sections += [("note", note) for note in self.notes]
        return [*sections, ("to reproduce", self._again())]

    def _again(self) -> str:
        """The command that runs this one test."""
        config = self.item.config
        path = os.path.relpath(self.item.path, config.invocation_params.dir)
        _, _, name = self.item.nodeid.partition("::")
        again = f"python -m pytest {shlex.quote(f'{path}::{name}')}"
        if isinstance(seed := getattr(config.option, "randomly_seed", None), int):
            again += f" --randomly-seed={seed}"
        return again

    def _output(self, when: str | None) -> list[tuple[str, str]]:
        """Captured output of every rank, up to a phase or of all; what is the same once."""
        by_content: dict[tuple[str, str], list[int]] = {}
        for story in self.stories:
            reports = [r for r in story.reports() if when is None or r["when"] == when]
            for name, content in reports[-1]["report"]["sections"] if reports else []:
                by_content.setdefault((name, content), []).append(story.rank)
            for stream, content in story.output.items() if when is None else ():
                name = f"Captured {stream} until it ended"
                by_content.setdefault((name, content), []).append(story.rank)
        size = len(self.stories)
        return [
            (name if len(ranks) == size else f"{name}, {list_ranks(ranks)}", content)
            for (name, content), ranks in by_content.items()
        ]


def _with_tuples(key: str, value: Any) -> Any:
    """What pytest has as tuples, which JSON knows only as lists."""
    if key in ("location", "longrepr") and isinstance(value, list):
        return tuple(value)
    if key in ("sections", "user_properties"):
        return [tuple(each) for each in value]
    return value


def _annotated(report: Mapping[str, Any], rank: int, heading: str) -> dict[str, Any]:
    """A rank's own report of an exception, under a line that names the rank."""
    longrepr = dict(report["longrepr"])
    head = {"type": "ReprEntryNative", "data": {"lines": [heading + "\n"]}}
    # pytest prints the chain, where there is one, and takes its summary's words from its end.
    chain = longrepr.get("chain") or [[longrepr["reprtraceback"], longrepr["reprcrash"], None]]
    chain[0][0]["reprentries"] = [head, *chain[0][0]["reprentries"]]
    for crash in (chain[-1][1], longrepr["reprcrash"]):
        if crash and not crash["message"].startswith(f"rank {rank}: "):
            crash["message"] = f"rank {rank}: {crash['message']}"
    return dict(report) | {"longrepr": longrepr}
