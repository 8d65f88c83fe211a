"""What a runtime asks of the world it opens."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from distctx.exceptions import LaunchEnvironmentError

if TYPE_CHECKING:
    import torch

    from distctx.stores import Store

__all__ = ["Request", "as_timeout"]


#: Seconds: torch counts in ms, and gloo overflows with hundreds of years.
_SHORTEST, _LONGEST = 0.001, 1e9


class Request(NamedTuple):
    """What a runtime asks of the world it opens.

    ``backend``, ``rank``, ``world_size`` and ``device`` are what the caller said, None where
    nothing was; a world that is there already is checked against just these.
    """

    backend: str | None = None
    rank: int | None = None
    world_size: int | None = None
    device: torch.device | None = None
    device_type: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None
    rendezvous_timeout: timedelta | None = None
    store: Store | None = None
    pg_options: Any = None


def as_timeout(value: float | timedelta | None, name: str) -> timedelta | None:
    """Seconds or a timedelta as a timedelta; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, timedelta)):
        raise LaunchEnvironmentError(f"{name} must be seconds or a timedelta, got {value!r}.")
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not _SHORTEST <= seconds <= _LONGEST:  # and so for nan
        raise LaunchEnvironmentError(
            f"{name}={value!r} must be from {_SHORTEST:g} s to {_LONGEST:g} s; every wait needs a "
            "bound."
        )
    return timedelta(seconds=seconds)
