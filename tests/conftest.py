"""Every test starts and ends without a process group."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from jobs import job
from launch import LAUNCH_VARIABLES
from suites import suite

__all__ = ["job", "suite"]

#: A project of its own, which test_pytest_plugin.py runs as such.
collect_ignore = ["downstream"]


@pytest.fixture(autouse=True)
def no_launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launch around the test, unless it is a rank; no process group and no hook left behind."""
    if request.node.get_closest_marker("distributed") is None:
        for name in LAUNCH_VARIABLES:
            monkeypatch.delenv(name, raising=False)
    hook = sys.excepthook
    if "distctx.stores" in sys.modules:
        monkeypatch.setattr("distctx.stores._kept", {})
    yield
    left = []
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            left.append("a process group")
            dist.destroy_process_group()
    if sys.excepthook is not hook:
        left.append("another sys.excepthook")
        sys.excepthook = hook
    assert not left, f"the test left behind: {', '.join(left)}"
