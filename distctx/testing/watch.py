"""The ranks of one test from start to end: two clocks, then the stacks, then the kill."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import pytest

from distctx.testing.journal import Folder
from distctx.testing.rank import kill_group
from distctx.testing.zygote import Exit
from distctx.traces import process_state

__all__ = ["Ranks", "Story", "watch", "went_wrong"]

#: Seconds that the others have, after the first rank has failed, to end by themselves.
GRACE = 1.0
#: Seconds in which a rank writes its stacks, and in which one that is killed must be gone.
STACKS_BOUND, KILL_BOUND = 0.5, 5.0
#: Seconds between two looks at what the ranks tell.
LOOK = 0.05


class Ranks(Protocol):
    """What starts and ends rank processes."""

    #: Seconds within which they begin with a test.
    @property
    def start_bound(self) -> float: ...

    def start(self, task: Mapping[str, Any]) -> None: ...

    def exits(self, seconds: float) -> list[Exit]: ...

    def ask_for_stacks(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


@attrs.define
class Story:
    """What became of one rank."""

    rank: int
    #: What it told, in order.
    events: list[dict[str, Any]] = attrs.field(factory=list)
    #: Its exit status, negative for a signal; None while it runs.
    status: int | None = None
    #: When it ended, by the clock of its events; None while it runs.
    ended: float | None = None
    #: Why it was killed by us, if it was, and the rank whose failure was the cause, if one was.
    stopped: str | None = None
    consequence_of: int | None = None
    #: The rank that ended the whole run meanwhile, as ``pytest.exit`` does.
    run_ended_by: int | None = None
    #: Whether it is known to have failed before all others.
    was_first: bool = False
    #: Where its threads stood when it was stopped, or when it crashed.
    stacks: str = ""
    #: What a rank that crashed had written in its last phase, by stream.
    output: dict[str, str] = attrs.field(factory=dict)

    def reports(self) -> list[dict[str, Any]]:
        """The events that are reports of setup, call and teardown."""
        return [event for event in self.events if event["event"] == "report"]

    def event(self, kind: str) -> dict[str, Any] | None:
        """The last event of a kind."""
        return next((event for event in reversed(self.events) if event["event"] == kind), None)

    def first_failure(self) -> float | None:
        """When the first thing went wrong that its rank itself knows of."""
        return min((report["at"] for report in self.reports() if went_wrong(report)), default=None)


def went_wrong(report: Mapping[str, Any]) -> bool:
    """Whether a rank's report tells of a failure, one that was expected included: others may wait
    for that rank."""
    return bool(report["failed"] or (report["xfail"] and report["outcome"] == "skipped"))


def watch(ranks: Ranks, task: Mapping[str, Any], timeout: float, *, clocks: bool) -> list[Story]:
    """Start the ranks of a task and wait for their end, in bounds.

    Args:
        timeout: seconds from when all ranks run.
        clocks: False: wait for as long as it takes, since somebody debugs.
    """
    return _Watch(ranks, task, timeout, clocks).run()


class _Watch:
    def __init__(self, ranks: Ranks, task: Mapping[str, Any], timeout: float, clocks: bool) -> None:
        self.ranks, self.timeout, self.clocks = ranks, timeout, clocks
        self.task = task
        self.folder = Folder(Path(task["folder"]))
        self.stories = [Story(rank) for rank in range(task["world_size"])]
        self.began: float | None = None  # when all ranks ran

    def run(self) -> list[Story]:
        try:
            self.ranks.start(self.task)
            self.asked = time.monotonic()
            try:
                self.follow()
            except pytest.fail.Exception as error:  # a guard around this, such as pytest-timeout
                self.stop(str(error), None)
        except ChildProcessError as error:
            self.lost(str(error))
        finally:
            if self.live():
                with contextlib.suppress(ChildProcessError):
                    self.ranks.kill()
        for story in self.stories:
            self.read(story)
        return self.stories

    def follow(self) -> None:
        while self.live():
            end, why, cause = self.deadline()
            left = end - time.monotonic()
            if left <= 0:
                self.stop(why, cause)
                return
            self.take(self.ranks.exits(min(left, LOOK)))

    def live(self) -> list[Story]:
        return [story for story in self.stories if story.ended is None]

    def deadline(self) -> tuple[float, str, int | None]:
        """When the ranks that still run are stopped, why, and whose failure is the cause."""
        if not self.clocks:
            return math.inf, "", None
        began = self.began
        if began is None:
            starts = [story.event("start") for story in self.stories]
            if not all(starts) and not any(story.ended for story in self.stories):
                bound = self.ranks.start_bound
                return self.asked + bound, f"not every rank had begun within {bound:g} s", None
            self.began = began = max((e["at"] for e in starts if e), default=self.asked)
        end = began + self.timeout, f"the test's {self.timeout:g} s were over", None
        return min([end, *self.failures()], key=lambda deadline: deadline[0])

    def failures(self) -> list[tuple[float, str, int | None]]:
        found: list[tuple[float, str, int | None]] = []
        for story in self.stories:
            at = story.first_failure()
            if at is None and story.ended is not None and story.event("end") is None:
                at = story.ended
            if at is not None:
                why = f"{GRACE:g} s after rank {story.rank} had failed"
                found.append((at + GRACE, why, story.rank))
        return found

    def take(self, exits: list[Exit]) -> None:
        """Note those that ended, and what the others tell."""
        for exit in exits:
            story = self.stories[exit.rank]
            story.status, story.ended = exit.status, exit.at
        for story in self.stories:
            story.events += self.folder.news(story.rank)
            if story.event("debugger"):
                self.clocks = False
        for story in self.stories:
            if story.event("stop") and story.run_ended_by is None:
                for each in self.stories:
                    each.run_ended_by = story.rank
                self.ranks.kill()

    def stop(self, why: str, cause: int | None) -> None:
        """Ask those that still run where they stand, then kill them."""
        stuck = self.live()
        self.ranks.ask_for_stacks()
        end = time.monotonic() + STACKS_BOUND
        while time.monotonic() < end and not all(
            "Current thread" in self.folder.text(self.folder.stacks(story.rank)) for story in stuck
        ):
            time.sleep(0.01)
        time.sleep(0.02)  # for the last lines of the last one
        for story in stuck:
            story.stopped, story.consequence_of = why, cause
            story.stacks = self.folder.text(self.folder.stacks(story.rank)) or _state(story)
        self.ranks.kill()
        end = time.monotonic() + KILL_BOUND
        while self.live() and time.monotonic() < end:
            self.take(self.ranks.exits(LOOK))

    def lost(self, why: str) -> None:
        """The process that forks ranks is gone; they die with it, and what they started too."""
        for story in self.live():
            story.events += self.folder.news(story.rank)
            story.stopped, story.ended = why, time.monotonic()
            if (start := story.event("start")) is not None:
                kill_group(start["pid"])

    def read(self, story: Story) -> None:
        """What is in the rank's files at the end."""
        story.events += self.folder.news(story.rank)
        if story.event("end") is None or story.status:
            story.stacks = story.stacks or self.folder.text(self.folder.stacks(story.rank))
            for stream in ("stdout", "stderr"):
                if text := self.folder.text(self.folder.output(story.rank, stream)):
                    story.output[stream] = text


def _state(story: Story) -> str:
    """Why a rank does not say where it stands, as far as the system knows."""
    start = story.event("start")
    if start is None:
        return "it had not started\n"
    if not (state := process_state(start["pid"])):
        return "it does not say where it stands\n"
    return f"it does not say where it stands; its state is {state}\n"
