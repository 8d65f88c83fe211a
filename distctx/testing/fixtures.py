"""The runtimes that fixtures hand out, and how they end."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from types import TracebackType
from typing import Any

import pytest

from distctx.runtime import DistributedRuntime
from distctx.testing import RANK
from distctx.testing.guards import left_group
from distctx.testing.marker import Ask, ask_of
from distctx.testing.rank import LOOPBACK

__all__ = ["Maker"]

#: Seconds by which a group outlasts its test, so that the test's own clock tells who hangs.
_LONGER = 30.0


class Maker:
    """Makes runtimes for one test; leaving its block closes them, whatever the test did."""

    def __init__(self, request: pytest.FixtureRequest, timeout: float) -> None:
        self.ask = ask_of(request.node, timeout) or Ask(1)
        self.rank: Any = request.config.pluginmanager.getplugin(RANK)
        self.failed = False
        self._made: list[DistributedRuntime] = []
        self._environment = pytest.MonkeyPatch()
        self._had_group = False

    def __enter__(self) -> Maker:
        self._had_group = left_group() is not None
        if self.rank is None and "GLOO_SOCKET_IFNAME" not in os.environ:
            self._environment.setenv("GLOO_SOCKET_IFNAME", LOOPBACK)
        return self

    def make(self, **arguments: Any) -> DistributedRuntime:
        """A runtime that is not entered, of this test's world."""
        ask = self.ask
        given: dict[str, Any] = dict(ask.runtime) | arguments
        if not ask.in_ranks:
            here: dict[str, Any] = {
                "backend": "fake",
                "rank": ask.rank,
                "world_size": ask.world_size,
            }
            runtime = DistributedRuntime(**(here | given))
        else:
            backend = _enough_gpus(ask.world_size) if ask.backend == "auto" else ask.backend
            times: dict[str, Any] = {}
            if ask.timeout < math.inf:
                times = {"timeout": ask.timeout + _LONGER, "rendezvous_timeout": ask.timeout}
            alone: dict[str, Any] = {"rank": 0, "world_size": 1}
            world = alone if self.rank is None else self.rank.meeting
            chosen: dict[str, Any] = {"backend": backend}
            runtime = DistributedRuntime(**(chosen | times | world | given))
        self._made.append(runtime)
        return runtime

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as ending:
            ending.callback(self._environment.undo)
            ending.callback(self._require_no_group)
            for runtime in self._made:
                ending.callback(runtime.close, abort=self.failed)

    def _require_no_group(self) -> None:
        """In a process that goes on to other tests, none may find the group of this one."""
        group = left_group()
        if group is None or self._had_group or self.rank is not None or not self.ask.guards:
            return
        sys.modules["torch.distributed"].destroy_process_group()
        pytest.fail(f"the test left behind: {group}", pytrace=False)


def _enough_gpus(ranks: int) -> str:
    import torch

    return "nccl" if torch.cuda.device_count() >= ranks else "gloo"
