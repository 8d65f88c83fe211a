"""What a runtime asks of the world it opens."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from distctx.exceptions import LaunchEnvironmentError

if TYPE_CHECKING:
    import torch

    from distctx.stores import Store

__all__ = ["Request", "as_timeout"]


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
    if not isinstance(value, timedelta):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise LaunchEnvironmentError(f"{name} must be seconds or a timedelta, got {value!r}.")
        if not math.isfinite(value):
            raise LaunchEnvironmentError(
                f"{name}={value!r} must be finite; every wait needs a bound."
            )
        value = timedelta(seconds=value)
    if value <= timedelta(0):
        raise LaunchEnvironmentError(f"{name}={value.total_seconds():g} s must be more than 0.")
    return value
