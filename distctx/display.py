"""Words about a runtime, for people. No torch here, and nobody is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from distctx.exceptions import DistctxError
from distctx.layout import Partition
from distctx.picture import code, draw, group_name

if TYPE_CHECKING:
    from distctx.runtime import DistributedRuntime

__all__ = ["Description", "as_html", "describe", "summary", "table"]

#: What a person must not forget of a world that has one process only.
_SIMULATED = ", simulated: collectives compute nothing"


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns as wide as they must be, two spaces between them."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


@attrs.frozen
class Description:
    """What a person wants to know of one rank; ``str()`` of it is a table of at most 80 columns.

    Attributes:
        state: of the runtime that was asked.
        rank: of whom this tells.
        world_size: how many ranks there are.
        coordinate: its index along each dim, by name.
        groups: its group along each dim, as ``MeshLayout.members`` gives it, by name.
        dp_partition: its share of the data; None where nothing says how the data is split.
        tp_size: how many ranks share one tensor.
        node: the host it is on, by number, where that is known.
        device: its device, where that is known.
    """

    state: str
    rank: int
    world_size: int
    coordinate: Mapping[str, int]
    groups: Mapping[str, tuple[range, ...]]
    dp_partition: Partition | None
    tp_size: int
    node: int | None
    device: str | None

    def __str__(self) -> str:
        dp = self.dp_partition
        rows = [
            ("rank", f"{self.rank} of {self.world_size}"),
            ("runtime", self.state),
            ("node", "not known" if self.node is None else str(self.node)),
            ("device", self.device or "not known"),
            ("dp_partition", "not said" if dp is None else f"{dp[1]} of {dp[0]}"),
            ("tp_size", str(self.tp_size)),
        ]
        for name, index in self.coordinate.items():
            rows.append((f"{name}={index}", f"with {group_name(self.groups[name], 50)}"))
        wide = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(wide)}  {value}"[:80] for name, value in rows)


def describe(runtime: DistributedRuntime, rank: int | None) -> Description:
    """What ``runtime`` knows of a rank, its own or another."""
    own_place = runtime._known_place()
    place = own_place if rank is None else own_place.seen_from(rank)
    layout, own = place.layout, place.rank == own_place.rank
    environment = runtime.environment
    node, local_size = environment.node_rank, environment.local_world_size
    if not own:
        node = (
            place.rank // local_size if local_size and layout.world_size % local_size == 0 else None
        )
    opened = runtime.state.value == "open"
    return Description(
        state=runtime.state.value + (_SIMULATED if runtime.is_simulated else ""),
        rank=place.rank,
        world_size=layout.world_size,
        coordinate=dict(zip(layout.dim_names, place.coordinate, strict=True)),
        groups={name: layout.members(place.rank, name) for name in layout.dim_names},
        dp_partition=place.dp_partition,
        tp_size=place.tp_size,
        node=node,
        device=str(runtime.device) if own and opened else None,
    )


def as_html(runtime: DistributedRuntime) -> str:
    """A runtime for a notebook: its repr and, where its place is known, the layout with this rank
    marked. Raises nothing, whatever the launch is."""
    try:
        place = runtime._known_place()
    except DistctxError:
        return code(repr(runtime))
    return draw(place.layout, place.rank).html(repr(runtime))


def summary(runtime: DistributedRuntime) -> str:
    """The inside of a runtime's repr. Raises nothing, whatever the launch is."""
    parts = [runtime.state.value]
    try:
        parts.append(str(runtime._known_place()))
    except DistctxError:
        parts.append("rank not known")
    if (hold := runtime._hold) is not None:
        parts.append(f"{hold.world.backend} on {hold.world.device}")
        parts.append("owns group" if runtime.owns_process_group else "shares group")
        if runtime.is_simulated:
            parts.append("simulated")
        parts.append("mesh built" if hold.cache.is_built else "mesh not built")
    return ", ".join(parts)
