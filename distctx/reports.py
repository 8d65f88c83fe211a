"""What ranks say of each other: of a meeting that failed, made from one report, so that all read
alike; and whether an error speaks of another rank."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from distctx.exceptions import (
    DistctxError,
    RankDisagreementError,
    RendezvousError,
    RendezvousTimeoutError,
)

__all__ = [
    "DISAGREE",
    "GAVE_UP",
    "SHOWN",
    "TWICE",
    "blames_others",
    "failure",
    "list_ranks",
    "name_of",
]

#: How a meeting can fail.
GAVE_UP, DISAGREE, TWICE = "gave up", "disagree", "twice"

#: What a rank says when another has gone, or does not come: of gloo, NCCL, torch's store, distctx.
_OTHERS_FAULT = re.compile(
    r"connection (?:was )?(?:likely )?(?:closed|reset)(?: by peer)?|broken pipe|connection refused"
    r"|remote process exited|ncclRemoteError|pair closure|lost the store"
    r"|timed out waiting \d+ ?ms|wait timeout|timeout waiting for key|before timing out"
    r"|collective operation timeout|errors while waiting for send/recv from rank"
    r"|failed to pass monitoredBarrier|Monitored ?Barrier encountered error",
    re.IGNORECASE,
)
#: Of which types that is.
_OTHERS_ERRORS = frozenset(
    {
        "RuntimeError",
        "DistError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "RendezvousError",
        "RendezvousTimeoutError",
    }
)

#: How many ranks an error lists before it only counts them.
SHOWN = 32


def failure(
    kind: str, report: Mapping[str, Any], purpose: str, place: str, world_size: int
) -> DistctxError:
    """The error of a meeting that was settled as ``kind``; the same on every rank."""
    if not report:
        return RendezvousError(
            f"The meeting {purpose} at {place} failed ({kind}), and the rank that knew why ended "
            "before it could say; look there for the first error."
        )
    guests = ", ".join(f"rank {rank} ({name})" for rank, name in report["guests"])
    more = report["arrived"] - len(report["guests"])
    came = f"Here: {guests}{f' and {more} more' if more > 0 else ''}."
    if kind == DISAGREE:
        return _disagreement(report["wants"], purpose)
    if kind == TWICE:
        card = report["twice"]
        return RendezvousError(
            f"Two processes claim rank {card['rank']} at {place}: {name_of(card)} came {purpose} "
            f"after another had taken it. {came} Give each process its own rank, and end what is "
            "left of an earlier run."
        )
    missing = report["missing"]
    if not missing:
        return RendezvousTimeoutError(
            f"Not one of the {world_size} ranks is absent from the meeting {purpose} at {place}, "
            f"but they were not let go within {report['seconds']:g} s. {came} Is rank 0 alive?"
        )
    return RendezvousTimeoutError(
        f"{len(missing)} of {world_size} ranks did not come {purpose} within {report['seconds']:g} "
        f"s at {place}: {list_ranks(missing)} absent. {came} Check that the absent were started "
        "and are alive, and reach this line of the program too; a longer wait is "
        "rendezvous_timeout=.",
        missing_ranks=missing,
    )


def _disagreement(wants: list[tuple[dict[str, Any], list[int]]], purpose: str) -> DistctxError:
    differing = [
        key
        for key in dict.fromkeys(key for want, _ in wants for key in want)
        if len({json.dumps(want.get(key)) for want, _ in wants}) > 1
    ]
    lines = "".join(
        f"\n  {list_ranks(ranks)}: "
        + ", ".join(f"{key}={_show(want.get(key))}" for key in differing)
        for want, ranks in wants
    )
    values = {
        rank: {key: want.get(key) for key in differing} for want, ranks in wants for rank in ranks
    }
    return RankDisagreementError(
        f"The ranks came {purpose}, but do not ask for the same:{lines}\n"
        "Pass the same on every rank.",
        dict(sorted(values.items())),
    )


def blames_others(kind: str, text: str) -> bool:
    """Whether an error, by the name of its type and its text, says that another rank has gone or
    does not come."""
    return kind in _OTHERS_ERRORS and _OTHERS_FAULT.search(text) is not None


def name_of(card: Mapping[str, Any]) -> str:
    return f"{card['host']}, pid {card['pid']}"


def list_ranks(ranks: list[int], word: str = "rank") -> str:
    shown = ", ".join(map(str, ranks[:SHOWN])) + (", …" if len(ranks) > SHOWN else "")
    return f"{word}{'s' if len(ranks) > 1 else ''} {shown}" if word else shown


def _show(value: Any) -> str:
    """A JSON value as Python shows it; lists were tuples."""
    return repr(tuple(value) if isinstance(value, list) else value)
