"""What a meeting that failed says. All ranks make it from one report, so that all read alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distctx.exceptions import (
    DistctxError,
    RankDisagreementError,
    RendezvousError,
    RendezvousTimeoutError,
)

__all__ = ["DISAGREE", "GAVE_UP", "SHOWN", "TWICE", "failure", "list_ranks", "name_of"]

#: How a meeting can fail.
GAVE_UP, DISAGREE, TWICE = "gave up", "disagree", "twice"

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


def name_of(card: Mapping[str, Any]) -> str:
    return f"{card['host']}, pid {card['pid']}"


def list_ranks(ranks: list[int], word: str = "rank") -> str:
    shown = ", ".join(map(str, ranks[:SHOWN])) + (", …" if len(ranks) > SHOWN else "")
    return f"{word}{'s' if len(ranks) > 1 else ''} {shown}" if word else shown


def _show(value: Any) -> str:
    """A JSON value as Python shows it; lists were tuples."""
    return repr(tuple(value) if isinstance(value, list) else value)
