"""What ``@pytest.mark.distributed`` asks for, read once and checked before any rank starts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from distctx.exceptions import LayoutError
from distctx.layout import MeshLayout
from distctx.runtime import DistributedRuntime
from distctx.testing import WORLD

__all__ = ["Ask", "ask_of", "parametrize"]

#: What the ranks of a test are told by other means, and may not be told by the marker.
_OURS = {"rank", "world_size", "init_method", "store", "timeout", "backend"}


@attrs.frozen
class Ask:
    """What one test asks for."""

    world_size: int
    #: The rank to answer as, in a simulated world.
    rank: int = 0
    #: Seconds that the test may take.
    timeout: float = math.inf
    backend: str = "gloo"
    #: Torch's own checks of every collective.
    detail: bool = True
    #: Whether what the test leaves behind is a failure.
    guards: bool = True
    #: All else that DistributedRuntime takes.
    runtime: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def in_ranks(self) -> bool:
        """Whether the test runs on real ranks, not in a simulated world."""
        return self.backend != "fake"


def parametrize(metafunc: pytest.Metafunc, mark: pytest.Mark) -> None:
    """Make one test of each world size, and of each rank of a simulated one."""
    worlds = _worlds(mark)
    ranks = _listed("rank", mark.kwargs.get("rank", 0))
    for size in worlds:
        for rank in ranks:
            _ask(mark, size, rank, math.inf)
    metafunc.fixturenames.append(WORLD)
    many = "rank" in mark.kwargs
    metafunc.parametrize(
        WORLD,
        [(size, rank) for size in worlds for rank in ranks],
        indirect=True,
        ids=[
            f"world_size={size}-rank={rank}" if many else f"world_size={size}"
            for size in worlds
            for rank in ranks
        ],
    )


def ask_of(item: pytest.Item, default_timeout: float) -> Ask | None:
    """What a test asks for, or None where it has no marker."""
    mark = item.get_closest_marker("distributed")
    if mark is None:
        return None
    callspec = getattr(item, "callspec", None)
    if callspec is not None and WORLD in callspec.params:
        size, rank = callspec.params[WORLD]
    else:  # the marker came too late to make several tests of this one, or it is a unittest's
        worlds = _worlds(mark)
        if len(worlds) > 1:
            raise _wrong(
                f"world_size={worlds}: one only, where the marker is added after collection, or in "
                "a unittest.TestCase"
            )
        size, rank = worlds[0], _listed("rank", mark.kwargs.get("rank", 0))[0]
    return _ask(mark, size, rank, default_timeout)


def _wrong(text: str) -> pytest.Collector.CollectError:
    return pytest.Collector.CollectError(f"@pytest.mark.distributed: {text}")


def _listed(name: str, given: Any) -> list[int]:
    """One or several whole numbers."""
    numbers = list(given) if isinstance(given, list | tuple | range) else [given]
    if not numbers or any(type(n) is not int or n < 0 for n in numbers):
        raise _wrong(f"{name}={given!r}: wanted a whole number, or a list of them")
    if len(set(numbers)) < len(numbers):
        raise _wrong(f"{name}={given!r} has a number twice")
    return numbers


def _worlds(mark: pytest.Mark) -> list[int]:
    if len(mark.args) > 1 or (mark.args and "world_size" in mark.kwargs):
        raise _wrong("only the world size may stand without its name, and only once")
    given = mark.args[0] if mark.args else mark.kwargs.get("world_size")
    if given is None:
        shape = mark.kwargs.get("mesh_shape")
        if not isinstance(shape, list | tuple) or any(type(n) is not int or n < 1 for n in shape):
            raise _wrong("say world_size=, or a mesh_shape without -1")
        given = math.prod(shape)
    sizes = _listed("world_size", given)
    if 0 in sizes:
        raise _wrong("world_size=0: a world has one rank at least")
    return sizes


def _ask(mark: pytest.Mark, size: int, rank: int, default_timeout: float) -> Ask:
    given = dict(mark.kwargs)
    given.pop("world_size", None)
    given.pop("rank", None)
    ask = Ask(
        world_size=size,
        rank=rank,
        timeout=given.pop("timeout", default_timeout),
        backend=given.pop("backend", "gloo"),
        detail=given.pop("detail", True),
        guards=given.pop("guards", True),
        runtime=given,
    )
    known = [name for name in inspect.signature(DistributedRuntime).parameters if name not in _OURS]
    if unknown := [name for name in given if name not in known]:
        raise _wrong(
            f"it does not take {', '.join(unknown)}; it takes world_size, rank, timeout, backend, "
            f"detail, guards, {', '.join(known)}"
        )
    timeout = ask.timeout
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise _wrong(f"timeout={timeout!r}: wanted seconds")
    if "rank" in mark.kwargs and ask.in_ranks:
        raise _wrong('rank= needs backend="fake"; a test of real ranks runs on all of them')
    if rank >= size:
        raise _wrong(f"rank={rank} is not in a world of {size}")
    if (shape := given.get("mesh_shape")) is not None:
        try:
            MeshLayout(shape, given.get("mesh_dim_names")).resolve(size)
        except LayoutError as error:
            raise _wrong(str(error)) from None
    return ask
