"""Tests on the ranks of a launch, as in ``torchrun -m pytest``: rank 0 leads, the others follow.

Each rank runs its part in its own process. What becomes of it travels through the store, never
through a collective, so that a rank that fails or hangs keeps no other from telling.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from distctx.environment import LaunchEnvironment
from distctx.exceptions import DistctxError
from distctx.rendezvous import meet
from distctx.reports import list_ranks
from distctx.stores import PrefixStore, Store, await_key, open_store, peek, wait_for_count
from distctx.testing import RANK
from distctx.testing.guards import Before, left_group
from distctx.testing.journal import as_json
from distctx.testing.marker import Ask, ask_of
from distctx.testing.rank import STACKS, Teller, clocks_run, item_of
from distctx.testing.session import Told, kept_folder, run_marked, torn_down
from distctx.testing.verdict import failure_here, reports_of
from distctx.testing.watch import GRACE, Story, went_wrong

__all__ = ["Follower", "Lead"]

#: Seconds: for all ranks to meet before the first test, and for each to begin the next one.
_MEETING, _BEGIN = 120.0, 30.0
#: Seconds beyond a test's time in which a rank that was interrupted must have told.
_TELL = 15.0
#: Seconds for which the others wait for news of rank 0, which runs the tests of one rank alone.
_SILENCE = 1800.0


class Party:
    """What lead and followers have in common: the store, and a rank's part in a test."""

    def __init__(
        self, config: pytest.Config, environment: LaunchEnvironment, timeout: float
    ) -> None:
        self.config, self.environment, self.default_timeout = config, environment, timeout
        self.rank, self.world_size = environment.rank, environment.world_size
        self.store: Store

    def meet(self) -> None:
        """Find a part of the store that is this run's alone; end the run without it."""
        try:
            self.store = PrefixStore("tests", self._meet())
        except DistctxError as error:
            pytest.exit(str(error), returncode=1)

    def _meet(self) -> Store:
        bound = timedelta(seconds=_MEETING)
        store, place = open_store(self.environment, None, bound)
        purpose = "to run tests"
        meeting = meet(
            PrefixStore("distctx-pytest", store), self.rank, self.world_size, {}, bound,
            place=place, purpose=purpose,
        )  # fmt: skip
        return meeting.store

    def take_part(
        self, number: int, item: pytest.Item, ask: Ask, folder: Path | None
    ) -> list[dict[str, Any]]:
        """Run this rank's part; returns what it has to tell, with times since it began."""
        events: list[dict[str, Any]] = []
        began = time.monotonic()

        def tell(event: str, **what: Any) -> None:
            events.append({"event": event, "at": time.monotonic() - began} | what)
            if event == "report" and went_wrong(what):
                self.store.compare_set(f"{number}/failed", "", str(self.rank))

        teller = Teller(self.config, tell, ask.backend, self.world_size)
        self.config.pluginmanager.register(teller, RANK)
        if folder is not None:
            teller.shared = folder / "shared"
            teller.shared.mkdir(parents=True, exist_ok=True)
        before = Before()
        try:
            with _checks(ask.detail):
                alarm = _Alarm(self.store, number, self.rank, ask, tell)
                with (
                    contextlib.suppress(pytest.fail.Exception),  # the alarm, just after the test
                    alarm if clocks_run(self.config) else contextlib.nullcontext(),
                ):
                    tell("start", pid=os.getpid())
                    teller.run(item)
                _let_go_of_errors()
            left = before.what_is_left() if ask.guards and not teller.failed else []
            tell("end", left=left)
        finally:
            self.config.pluginmanager.unregister(teller)
            if left_group() is not None:  # it would poison the tests after this one
                sys.modules["torch.distributed"].destroy_process_group()
        return events


def _let_go_of_errors() -> None:
    """Empty the frames of the last error, which pytest keeps: they hold process groups.

    A gloo group keeps its connections for as long as anybody holds it, destroyed or not, and the
    others wait on them (20 s, where the group was dropped 0.5 s).
    """
    error = getattr(sys, "last_value", None)
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            with contextlib.suppress(RuntimeError):  # it runs still
                frame.clear()
            _ = frame.f_locals  # up to Python 3.12 a frame keeps what this gave, until it is asked
        error = error.__cause__ or error.__context__
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        sys.__dict__.pop(name, None)
    gc.collect()


@contextlib.contextmanager
def _checks(wanted: bool) -> Iterator[None]:
    """Torch's own checks of every collective, while a test runs."""
    with pytest.MonkeyPatch.context() as environment:
        if wanted:
            environment.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        _obey_environment()
        yield
    _obey_environment()


def _obey_environment() -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.distributed.set_debug_level_from_env()


class _Alarm:
    """A test's two clocks, in a process that goes on: it is interrupted, not killed.

    A thread looks whether another rank has failed, and at the time. When it is up, it writes down
    where this rank stands and raises in the main thread. A collective hears that only when it
    returns: when its peers have gone, or at its group's timeout.
    """

    def __init__(self, store: Store, number: int, rank: int, ask: Ask, tell: Any) -> None:
        self.store, self.key, self.rank, self.tell = store, f"{number}/failed", rank, tell
        self.seconds = ask.timeout
        self.end = time.monotonic() + self.seconds
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="distctx-alarm", daemon=True)
        self.why = ""

    def __enter__(self) -> _Alarm:
        self.before = signal.signal(STACKS, self._raise)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join(5)
        signal.signal(STACKS, self.before)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self.done.is_set():
            pytest.fail(self.why)

    def _watch(self) -> None:
        while not self.done.wait(0.05):
            with contextlib.suppress(RuntimeError):  # the store has gone, and with it the launch
                first = peek(self.store, self.key)
                if first is not None and first != str(self.rank):
                    if self.done.wait(GRACE):
                        return
                    self._strike(f"{GRACE:g} s after rank {first} had failed", int(first))
                    return
            if time.monotonic() > self.end:
                self._strike(f"the test's {self.seconds:g} s were over", None)
                return

    def _strike(self, why: str, cause: int | None) -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            stacks = file.read().replace("Current thread", "Thread")  # this one only watches
        self.why = why
        self.tell("stopped", why=why, cause=cause, stacks=stacks)
        signal.pthread_kill(threading.main_thread().ident or 0, STACKS)


def _story(rank: int, events: list[dict[str, Any]]) -> Story:
    """A rank's story; what it raised because it was interrupted is no failure of its own."""
    story = Story(rank, events, status=0, ended=events[-1]["at"] if events else None)
    if story.event("stop") is not None:
        story.run_ended_by = rank
    if (stopped := story.event("stopped")) is not None:
        story.stopped, story.consequence_of = stopped["why"], stopped["cause"]
        story.stacks = stopped["stacks"]
        for report in story.reports():
            if report["at"] >= stopped["at"]:
                report["failed"] = False
    return story


class Lead(Party):
    """The plugin of rank 0: says which test is next, and reports what all ranks tell."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.number = 0
        self.lost: dict[int, str] = {}  # ranks that no longer follow, and in which test

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        """Meet the others before the first test; send them home after the last."""
        if session.config.option.collectonly:
            return (yield)
        self.meet()
        self.store.set("seed", json.dumps(self.config.getoption("randomly_seed", None)))
        try:
            return (yield)
        finally:
            self._announce({"end": True})
            others = self.world_size - 1 - len(self.lost)
            wait_for_count(self.store, "gone", others, time.monotonic() + 5)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """A test of many ranks, on all of them; every other test here alone."""
        done = run_marked(item, nextitem, self.default_timeout, self._reports)
        if done is None:
            self.store.add("news", 1)
        return done

    def _announce(self, what: dict[str, Any]) -> None:
        self.number += 1
        self.store.set(f"{self.number}/test", json.dumps(what))

    def _reports(self, item: pytest.Item, ask: Ask) -> Told:
        if (report := self._cannot_run(item, ask)) is not None:
            return [report], []
        # All ends here, so that what is there afterwards is this test's.
        torn = torn_down(item, None)
        folder = kept_folder(item)
        self._announce({"nodeid": item.nodeid, "folder": str(folder) if folder else None})
        if absent := self._absent():
            self.store.set(f"{self.number}/go", "no")
            self.lost.update(dict.fromkeys(absent, item.nodeid))
            names = list_ranks(absent).capitalize()
            why = f"{names} did not come to this test within {_BEGIN:g} s."
            return [*([torn] if torn else []), failure_here(item, "setup", why)], []
        self.store.set(f"{self.number}/go", "yes")
        mine = self.take_part(self.number, item, ask, folder)
        stories = [_story(0, mine), *self._told(item, ask)]
        if (first := peek(self.store, f"{self.number}/failed")) is not None:
            stories[int(first)].was_first = True  # their own times begin some milliseconds apart
        events = [event for story in stories[1:] for event in story.events]
        events += [event for event in mine if event["event"] == "stop"]  # all else was said here
        return [*([torn] if torn else []), *reports_of(item, stories)], events

    def _cannot_run(self, item: pytest.Item, ask: Ask) -> pytest.TestReport | None:
        if ask.world_size != self.world_size:
            why = f"needs {ask.world_size} ranks, this launch has {self.world_size}"
            return _skipped(item, why)
        if self.lost:
            names = "; ".join(f"rank {rank} since {test}" for rank, test in self.lost.items())
            return failure_here(item, "setup", f"Ranks of this launch no longer answer: {names}.")
        return None

    def _absent(self) -> list[int]:
        """The ranks that do not come."""
        end = time.monotonic() + _BEGIN
        return [
            rank
            for rank in range(1, self.world_size)
            if await_key(self.store, f"{self.number}/here/{rank}", end - time.monotonic()) is None
        ]

    def _told(self, item: pytest.Item, ask: Ask) -> list[Story]:
        """The stories of the others, each waited for within one bound."""
        end = (
            time.monotonic()
            + (ask.timeout if clocks_run(self.config) else math.inf)
            + GRACE
            + _TELL
        )
        stories = []
        for rank in range(1, self.world_size):
            told = await_key(self.store, f"{self.number}/told/{rank}", end - time.monotonic())
            if told is None:
                self.lost[rank] = item.nodeid
                why = "it was interrupted, and does not answer"
                story = Story(rank, stopped=why)
            else:
                story = _story(rank, json.loads(told))
            stories.append(story)
        return stories


class Follower(Party):
    """The plugin of every other rank: runs what rank 0 runs, in its order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.part: tuple[int, Ask, Path | None]
        self.events: list[dict[str, Any]] = []
        for name in ("lfplugin", "nfplugin", "stepwiseplugin"):  # rank 0 writes the cache
            if self.config.pluginmanager.hasplugin(name):
                self.config.pluginmanager.unregister(name=name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """In place of all tests, those that rank 0 names."""
        if session.config.option.collectonly:
            return None
        self.meet()
        if (seed := json.loads(await_key(self.store, "seed", _BEGIN) or "null")) is not None:
            session.config.option.randomly_seed = seed  # or each rank's tests would have their own
        number = 1
        while "end" not in (test := json.loads(self._next(number))):
            self.store.set(f"{number}/here/{self.rank}", "1")
            if await_key(self.store, f"{number}/go", 2 * _BEGIN) == "yes":
                self.store.set(
                    f"{number}/told/{self.rank}",
                    as_json(self._run(session, number, test)),
                )
            number += 1
        self.store.add("gone", 1)
        return True

    def _next(self, number: int) -> str:
        """What rank 0 says of the next test, as long as it shows that it goes on."""
        while True:
            news = self.store.add("news", 0)
            end = time.monotonic() + _SILENCE
            while self.store.add("news", 0) == news:
                if (test := await_key(self.store, f"{number}/test", 1.0)) is not None:
                    return test
                if time.monotonic() > end:
                    pytest.exit(f"rank 0 has told nothing for {_SILENCE:g} s", returncode=1)

    def _run(
        self, session: pytest.Session, number: int, test: dict[str, Any]
    ) -> list[dict[str, Any]]:
        item = item_of(test["nodeid"], session.items)
        ask = None if item is None else ask_of(item, self.default_timeout)
        if item is None or ask is None:
            return [{"event": "absent", "at": 0.0, "text": f"it did not collect {test['nodeid']}"}]
        folder = Path(test["folder"]) if test["folder"] else None
        self.part = number, ask, folder
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        return self.events

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """This rank's part, within what other plugins put around every test."""
        number, ask, folder = self.part
        self.events = self.take_part(number, item, ask, folder)
        return True


def _skipped(item: pytest.Item, why: str) -> pytest.TestReport:
    def skip() -> None:
        pytest.skip(why)

    call = pytest.CallInfo.from_call(skip, when="setup")
    report = pytest.TestReport.from_item_and_call(item, call)
    path, line, _ = item.reportinfo()
    report.longrepr = str(path), (line or 0) + 1, f"Skipped: {why}"
    return report
