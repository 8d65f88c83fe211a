"""The run that collected: it starts the ranks of each marked test, and reports what they tell."""

from __future__ import annotations

import importlib
import re
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from distctx.testing import _pytest
from distctx.testing.fresh import Fresh
from distctx.testing.gate import places
from distctx.testing.marker import Ask, ask_of
from distctx.testing.rank import clocks_run, item_of, run_here, task_for
from distctx.testing.verdict import failure_here, reports_of
from distctx.testing.watch import Ranks, Story, watch
from distctx.testing.zygote import Zygote, why_not_fork

__all__ = ["RankTests", "Told", "kept_folder", "run_marked", "torn_down"]


class RankTests:
    """The plugin of a run that has tests of many ranks."""

    def __init__(self, config: pytest.Config, default_timeout: float) -> None:
        self.config = config
        self.default_timeout = default_timeout
        fresh = config.getoption("distributed_fresh")
        self.why_fresh = "asked for" if fresh else why_not_fork()
        self._number = 0
        # While tests run:
        self._ranks: Ranks
        self._folder: Path

    def header(self) -> list[str]:
        """What the run says of its ranks."""
        if self.why_fresh is None:
            return []
        return [f"distctx: each rank is a fresh process that collects again ({self.why_fresh})"]

    @pytest.hookimpl(wrapper=True, trylast=True)  # within what logs, and what counts coverage
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        """Fork what forks the ranks before any test runs; end it after the last."""
        if session.config.option.collectonly:
            return (yield)
        _pytest.base_folder(self.config)  # made now, so that no rank makes one of its own
        with tempfile.TemporaryDirectory(prefix="distctx-", ignore_cleanup_errors=True) as folder:
            self._folder = Path(folder)
            self._ranks = Fresh(self.config)
            if self.why_fresh is None:
                try:
                    self._ranks = Zygote(self.config, self._be_rank(session))
                except OSError as error:
                    self.why_fresh = str(error)
            try:
                return (yield)
            finally:
                self._ranks.close()

    def _be_rank(self, session: pytest.Session) -> Callable[[Mapping[str, Any], int], NoReturn]:
        def be_rank(task: Mapping[str, Any], rank: int) -> NoReturn:
            item = item_of(task["nodeid"], session.items)
            if item is None:
                raise LookupError(f"{task['nodeid']} is not among the tests")
            self.config.pluginmanager.unregister(self)
            run_here(self.config, item, task, rank)

        return be_rank

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run a marked test on ranks of its own."""
        return run_marked(item, nextitem, self.default_timeout, self._reports)

    def _reports(self, item: pytest.Item, ask: Ask) -> Told:
        stories = self._run(item, ask)
        events = [event for story in stories for event in story.events]
        return reports_of(item, stories, self.header()), events

    def _run(self, item: pytest.Item, ask: Ask) -> list[Story]:
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        own = kept_folder(item) or folder
        task = task_for(item, ask, folder, own, _free_port())
        clocks = clocks_run(self.config)
        with places(self._common_folder(), ask.world_size):
            stories = watch(self._ranks, task, ask.timeout, clocks=clocks)
            began = any(story.events for story in stories)
            if isinstance(self._ranks, Zygote) and (self._ranks.is_gone or not began):
                self._ranks.close()
                self._ranks = Fresh(self.config)
                self.why_fresh = "the process that forked ranks has ended, or does not answer"
                if not began:  # no rank has touched the test
                    stories = watch(self._ranks, task, ask.timeout, clocks=clocks)
        return stories

    def _common_folder(self) -> Path | None:
        """A folder that all workers of this run share, or None where there are none."""
        if not hasattr(self.config, "workerinput"):
            return None
        base = _pytest.base_folder(self.config)
        return None if base is None else base.parent


def kept_folder(item: pytest.Item) -> Path | None:
    """Where the folders stand that a test sees; kept as long as any ``tmp_path`` is."""
    if _pytest.base_folder(item.config) is None:
        return None
    return _pytest.new_folder(item.config, re.sub(r"\W", "_", item.name)[:30])


Told = tuple[Sequence[pytest.TestReport], Sequence[Mapping[str, Any]]]


def run_marked(
    item: pytest.Item,
    nextitem: pytest.Item | None,
    timeout: float,
    run: Callable[[pytest.Item, Ask], Told],
) -> bool | None:
    """Run a test of many ranks in pytest's place, or return None for another test.

    Args:
        timeout: seconds for a test whose marker does not say.
        run: gives a test's reports, and what its ranks told.
    """
    try:
        ask = ask_of(item, timeout)
    except pytest.Collector.CollectError as error:  # it asks for what cannot be
        text = str(error)
        return _report_on(item, nextitem, lambda: ([failure_here(item, "setup", text)], []))
    if ask is None or not ask.in_ranks:
        return None
    return _report_on(item, nextitem, lambda: run(item, ask))


def _report_on(item: pytest.Item, nextitem: pytest.Item | None, run: Callable[[], Told]) -> bool:
    """Log a test's reports, and pass on what the ranks' events ask for."""
    log = item.ihook.pytest_runtest_logreport
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    try:
        reports, events = run()
    except pytest.fail.Exception as error:  # a guard around this, while it waits for its turn
        reports, events = [failure_here(item, "setup", str(error))], []
    _pass_on_warnings(item, events)
    stop = next((event for event in events if event["event"] == "stop"), None)
    if stop is None or any(report.failed for report in reports):
        for report in reports:
            log(report=report)
    if stop is not None and stop["interrupt"]:
        raise KeyboardInterrupt(stop["text"])
    if stop is not None:
        pytest.exit(stop["text"], returncode=stop["returncode"])
    # What was set up in this process, and serves no test to come, ends now, as after any test.
    if (torn := torn_down(item, nextitem)) is not None:
        log(report=torn)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def torn_down(item: pytest.Item, nextitem: pytest.Item | None) -> pytest.TestReport | None:
    """End fixtures of this process; the report of what fails there."""
    end = pytest.CallInfo.from_call(lambda: _pytest.tear_down_for(item, nextitem), when="teardown")
    return None if end.excinfo is None else pytest.TestReport.from_item_and_call(item, end)


def _pass_on_warnings(item: pytest.Item, events: Sequence[Mapping[str, Any]]) -> None:
    """Warnings of the ranks, each once."""
    told = {
        (event["text"], *event["category"], event["filename"], event["lineno"]): None
        for event in events
        if event["event"] == "warning"
    }
    for text, module, name, filename, lineno in told:
        warning = warnings.WarningMessage(
            _warning(text, module, name),
            None,  # type: ignore[arg-type]
            filename,
            lineno,
        )
        warning.category = type(warning.message)  # type: ignore[assignment]
        item.config.hook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": warning,
                "when": "runtest",
                "nodeid": item.nodeid,
                "location": None,
            }
        )


def _warning(text: str, module: str, name: str) -> Warning:
    """A warning of the category that a rank names."""
    try:
        category = getattr(importlib.import_module(module), name)
        return category(text)  # type: ignore[no-any-return]
    except Exception:  # it is the test's own, and can be made in other ways only
        return UserWarning(f"{name}: {text}")


def _free_port() -> int:
    """For a test that starts its group from the environment; nobody listens there else."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
