"""The errors distctx raises.

Each has a builtin parent, so code that does not know distctx still catches it, and each can be
pickled, since errors cross from process to process::

    RuntimeError
    └── DistctxError
        ├── LaunchEnvironmentError   (also ValueError)
        ├── LayoutError              (also ValueError)
        ├── RendezvousError
        │   ├── RendezvousTimeoutError   (also TimeoutError)
        │   └── RankDisagreementError
        ├── GroupConflictError
        ├── RemoteRankError
        └── RuntimeStateError
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "DistctxError",
    "GroupConflictError",
    "LaunchEnvironmentError",
    "LayoutError",
    "RankDisagreementError",
    "RemoteRankError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "RuntimeStateError",
]


class DistctxError(RuntimeError):
    """Root of every error that distctx raises on purpose."""


class LaunchEnvironmentError(DistctxError, ValueError):
    """What the launcher and the arguments say does not make one launch; names each variable."""


class LayoutError(DistctxError, ValueError):
    """A mesh shape, a dim or a rank that cannot be; says what is valid."""


class RendezvousError(DistctxError):
    """The ranks could not meet: the store cannot be reached, or a rank is held twice."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Ranks did not come within the rendezvous timeout.

    Attributes:
        missing_ranks: the ranks that did not come, ascending. ``(0,)`` where rank 0 is absent:
            without it nobody can tell about the rest.
    """

    def __init__(self, message: str, missing_ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks: tuple[int, ...] = tuple(missing_ranks)


class RankDisagreementError(RendezvousError):
    """The ranks came, but do not ask for the same thing.

    Attributes:
        values: what each rank asked for, by rank; only what differs.
    """

    def __init__(self, message: str, values: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        super().__init__(message)
        self.values: dict[int, Mapping[str, Any]] = dict(values or {})


class GroupConflictError(DistctxError):
    """The process group that is there already is not the one that was asked for."""


class RemoteRankError(DistctxError):
    """Another rank failed in a block that this rank depends on.

    Attributes:
        rank: the rank that failed.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class RuntimeStateError(DistctxError):
    """A runtime was asked for something it cannot give in its present state."""


def exit_status(error: BaseException) -> int:
    """What ``python -m distctx`` exits with where a command failed with ``error``."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, (LayoutError, LaunchEnvironmentError)):
        return 2
    return 3 if isinstance(error, RendezvousError) else 1
