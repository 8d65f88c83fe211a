"""The pytest plugin: tests on several real ranks, and fixtures that are entered runtimes.

Pytest loads it wherever distctx is installed. It imports neither torch nor the rest of distctx
until a test is marked, or asks for one of its fixtures.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from distctx.testing import RANK, TASK, WORLD

if TYPE_CHECKING:
    from distctx.environment import LaunchEnvironment
    from distctx.runtime import DistributedRuntime
    from distctx.testing.session import RankTests

__all__: list[str] = []

_MARKER = (
    "distributed(world_size, *, mesh_shape, mesh_dim_names, timeout, backend='gloo', rank, "
    "detail=True, guards=True, ...): run the test on that many real ranks, processes of this "
    "machine; a list of world sizes makes a test of each. timeout: seconds for the test. backend: "
    "'auto' takes nccl where there are GPUs enough; 'fake' simulates one rank (rank=, or a list) "
    "in this process. detail=False: without torch's own checks of every collective. guards=False: "
    "the test may leave a group, variable, hook, thread or child behind. All else is handed to "
    "DistributedRuntime."
)

_tests: pytest.StashKey[RankTests] = pytest.StashKey()
_failed: pytest.StashKey[bool] = pytest.StashKey()
_launch: pytest.StashKey[LaunchEnvironment | None] = pytest.StashKey()
_said: pytest.StashKey[_Held] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("distctx", "distributed tests (distctx)")
    group.addoption(
        "--distributed-fresh",
        action="store_true",
        help="start each rank of a distributed test as a fresh process that collects again, "
        "in place of forking it (slow)",
    )
    parser.addini(
        "distributed_timeout",
        "seconds that a distributed test may take whose marker does not say",
        default="60",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    # -k takes no "=": the ids' own way to write a world size would be an error.
    keyword = getattr(config.option, "keyword", "")
    config.option.keyword = re.sub(r"\bworld_size=(\d+)", r"world_size:\1:", keyword)
    if task := os.environ.pop(TASK, None):
        from distctx.testing.fresh import FreshRank

        config.pluginmanager.register(FreshRank(config, task), "distctx-fresh-rank")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Under a launcher rank 0 speaks for all; another rank speaks only where it can't go on."""
    launch = config.stash[_launch] = _find_launch()
    if launch is None or launch.rank == 0:
        return (yield)
    config.option.xmlpath = None  # rank 0 writes it
    if config.option.basetemp:  # which each run empties
        config.option.basetemp = f"{config.option.basetemp}-rank{launch.rank}"
    said = config.stash[_said] = _Held(sys.stdout)
    with contextlib.redirect_stdout(said):  # the terminal reporter writes to what it finds there
        status = yield
    if said.held and status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        print(said.getvalue(), file=sys.stderr)
    return status


class _Held(io.StringIO):
    """What is said while it is not known yet, or is known, that another rank speaks."""

    def __init__(self, to: IO[str]) -> None:
        super().__init__()
        self.to, self.held = to, True

    def write(self, text: str) -> int:
        return super().write(text) if self.held else self.to.write(text)

    def let_go(self) -> None:
        """Say it, and all that comes."""
        self.held = False
        self.to.write(self.getvalue())


def _find_launch() -> LaunchEnvironment | None:
    """The launch that this pytest is a rank of, or None."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
    if TASK in os.environ or not any(name in os.environ for name in names):
        return None
    from distctx.environment import LaunchEnvironment
    from distctx.exceptions import LaunchEnvironmentError

    try:
        launch = LaunchEnvironment.detect()
    except LaunchEnvironmentError:  # half a launch: a shell on a cluster, mostly
        return None
    return launch if launch.world_size > 1 else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if (mark := metafunc.definition.get_closest_marker("distributed")) is not None:
        from distctx.testing.marker import parametrize

        parametrize(metafunc, mark)


def pytest_itemcollected(item: pytest.Item) -> None:
    params = getattr(getattr(item, "callspec", None), "params", {})
    if WORLD in params:
        item.extra_keyword_matches.add(f"world_size:{params[WORLD][0]}:")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.pluginmanager.hasplugin("distctx-fresh-rank"):
        return
    config = session.config
    if not any(item.get_closest_marker("distributed") is not None for item in session.items):
        if _said in config.stash:  # no test is distctx's, so each rank is a pytest of its own
            config.stash[_said].let_go()
        return
    timeout = _timeout(config)
    plugin: Any
    if (launch := config.stash.get(_launch, None)) is not None:
        from distctx.testing.launched import Follower, Lead

        plugin = (Follower if launch.rank else Lead)(config, launch, timeout)
    else:
        from distctx.testing.session import RankTests

        plugin = config.stash[_tests] = RankTests(config, timeout)
    config.pluginmanager.register(plugin, "distctx-tests")


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return config.stash[_tests].header() if _tests in config.stash else []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.excinfo is not None:
        item.stash[_failed] = True


def _timeout(config: pytest.Config) -> float:
    given = config.getini("distributed_timeout")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise pytest.UsageError(f"distributed_timeout = {given}: wanted seconds")
    return seconds


@pytest.fixture
def _distctx_world(request: pytest.FixtureRequest) -> Any:
    """How a world size becomes part of a test's id."""
    return request.param


@pytest.fixture
def make_distributed_runtime(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., DistributedRuntime]]:
    """Make runtimes that are not entered yet, and close them after the test.

    It takes what DistributedRuntime takes, in addition to what the test's marker says. Without a
    marker each is a world of 1.
    """
    from distctx.testing.fixtures import Maker

    with Maker(request, _timeout(request.config)) as maker:
        yield maker.make
        maker.failed = request.node.stash.get(_failed, False)


@pytest.fixture
def distributed_runtime(
    make_distributed_runtime: Callable[..., DistributedRuntime],
) -> DistributedRuntime:
    """A DistributedRuntime, entered: on every rank of a marked test, else a world of 1."""
    return make_distributed_runtime().open()


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """One temporary folder for all ranks of a test; ``tmp_path`` is a folder for each."""
    rank: Any = request.config.pluginmanager.getplugin(RANK)
    path: Path = request.getfixturevalue("tmp_path") if rank is None else rank.shared
    return path
