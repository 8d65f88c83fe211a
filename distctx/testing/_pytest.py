"""What the plugin calls of pytest's own insides, with the reason."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

__all__ = [
    "base_folder",
    "capture",
    "capture_off",
    "new_folder",
    "run_item",
    "set_base_folder",
    "tear_down_for",
]


def run_item(item: pytest.Item) -> None:
    """Set up, call and tear down all, without logging the reports.

    The public hook logs each report in this process, where a rank's reports belong to another.
    pytest-forked and pytest-rerunfailures stand on the same function.
    """
    runtestprotocol(item, nextitem=None, log=False)


def tear_down_for(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the fixtures of this process that the next test does not use.

    The hook that does so serves an item that was set up here, and this one was not.
    """
    item.session._setupstate.teardown_exact(nextitem)


def capture(config: pytest.Config) -> Any:
    """The manager of captured output, or None where there is none.

    A rank must write to files of its own; no fixture can give it these.
    """
    return config.pluginmanager.getplugin("capturemanager")


def capture_off(config: pytest.Config) -> Any:
    """A block in which what is printed goes where pytest's own output goes.

    Only a fixture gives it in public, and a rank may stop in any test.
    """
    manager = capture(config)
    return contextlib.nullcontext() if manager is None else manager.global_and_fixture_disabled()


def base_folder(config: pytest.Config) -> Path | None:
    """The folder of this run's temporary folders, which is made now; None where pytest has none.

    Only a fixture gives it in public, and the ranks' folders are made where no fixture is.
    """
    factory = getattr(config, "_tmp_path_factory", None)
    return None if factory is None else factory.getbasetemp()


def new_folder(config: pytest.Config, name: str) -> Path:
    """A new folder in it."""
    return config._tmp_path_factory.mktemp(name, numbered=True)  # type: ignore[attr-defined,no-any-return]


def set_base_folder(config: pytest.Config, path: Path) -> None:
    """From now on, ``tmp_path`` is a folder in ``path``: ranks must not share one."""
    factory: Any = getattr(config, "_tmp_path_factory", None)
    if hasattr(factory, "_basetemp"):
        path.mkdir(parents=True, exist_ok=True)
        factory._basetemp = path
