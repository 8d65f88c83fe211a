"""Pictures of a layout and words about a runtime, for people. No torch here, and nobody is
asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from distctx.exceptions import DistctxError
from distctx.layout import Dim, MeshLayout, Partition

if TYPE_CHECKING:
    from distctx.runtime import DistributedRuntime

__all__ = ["Description", "describe", "draw", "elide", "summary", "table"]

#: What stands for what is left out.
_DOTS = "…"


def elide(number: int, room: int, keep: int | None = None) -> list[int | None]:
    """Which of ``number`` things to show where ``room`` fit; None stands for those left out.

    The first ones and the last are shown, and ``keep``, whichever it is.
    """
    if number <= max(room, 2):
        return list(range(number))
    kept = {*range(max(room - 2, 1)), number - 1}
    shown: list[int | None] = []
    before = -1
    for one in sorted(kept if keep is None else kept | {keep}):
        if one > before + 1:
            shown.append(None)
        shown.append(one)
        before = one
    return shown


def group_name(members: Sequence[range], width: int) -> str:
    """The ranks of a group, at most 8 and elided to ``width`` columns where that can be.

    ``members`` is the group as ``MeshLayout.members`` gives it.
    """
    size = math.prod(len(part) for part in members)
    name = ""
    for room in range(8, 2, -1):
        shown = []
        for position in elide(size, room):
            rank, rest = 0, position or 0
            for part in reversed(members):
                rest, index = divmod(rest, len(part))
                rank += part[index]
            shown.append(_DOTS if position is None else str(rank))
        name = ", ".join(shown)
        if len(name) <= width:
            break
    return name


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns as wide as they must be, two spaces between them."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def draw(
    layout: MeshLayout,
    rank: int | None = None,
    groups: Sequence[Dim] = (),
    width: int = 80,
    height: int = 40,
) -> str:
    """A layout as a grid of ranks: the last dim to the right, the one before it down, the rest
    stacked.

    Costs what is shown, not what the world has.

    Args:
        layout: with every size known.
        rank: marked ``[13]``; its group along ``groups`` is marked ``(5)``.
        groups: the dims of the groups that are listed below.
        width: columns to stay within.
        height: lines to stay within, roughly.
    """
    coordinate = None if rank is None else layout.coordinate(rank)
    members = None if rank is None or not groups else layout.members(rank, *groups)
    dims = layout.dims(groups) if groups else ()
    *outer, down, right = (1,) * max(0, 2 - layout.ndim) + layout.shape
    names = layout.dim_names
    digits = len(str(layout.world_size - 1))
    label = "" if layout.ndim < 2 else f"{names[-2]}={down - 1}"
    fits = (width - len(label) - 2) // (digits + 3)
    cells = fits if right <= fits else max(fits - 2, 3)
    # Where the own rank stands is never left out.
    at = (None,) * 3 if rank is None else _position(rank, down, right)
    columns = elide(right, cells, at[2])
    blocks = elide(math.prod(outer), max(height // (min(down, 8) + 3), 2), at[0])
    rows = elide(down, max(height // len(blocks) - 2, 3), at[1])

    def cell(base: int, column: int | None) -> str:
        if column is None:
            return _DOTS.center(digits + 2)
        here = base + column
        if here == rank:
            return f"[{here}]".rjust(digits + 2)
        alike = coordinate is not None and members is not None
        if alike and _differs_only_in(dims, layout.coordinate(here), coordinate or ()):
            return f"({here})".rjust(digits + 2)
        return f"{here} ".rjust(digits + 2)

    lines = []
    head = f"{names[-1]}=".rjust(len(label) + 1)
    head += " ".join((_DOTS if c is None else f"{c} ").rjust(digits + 2) for c in columns)
    lines.append(head.rstrip())
    for block in blocks:
        if block is None:
            lines.append(_DOTS)
            continue
        if outer:
            lines.append(_outer_name(names, outer, block))
        for row in rows:
            text = _DOTS if row is None else (f"{names[-2]}={row}" if layout.ndim > 1 else "")
            line = text.ljust(len(label) + 1)
            if row is not None:
                base = (block * down + row) * right
                line += " ".join(cell(base, column) for column in columns)
            lines.append(line.rstrip())
    plural = "s" if layout.world_size > 1 else ""
    title = " × ".join(f"{n}={size}" for n, size in zip(names, layout.shape, strict=True))
    picture = [f"{title}: {layout.world_size} rank{plural}", "", *lines]
    if coordinate is not None and rank is not None:
        picture += ["", f"[{rank}] rank {rank} at {layout.name_of(coordinate)}"]
    if groups:
        picture += ["", *_group_lines(layout, dims, rank, width)]
    return "\n".join(picture)


def _position(rank: int, down: int, right: int) -> tuple[int, int, int]:
    """Block, row and column of a rank."""
    rest, column = divmod(rank, right)
    block, row = divmod(rest, down)
    return block, row, column


def _differs_only_in(dims: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    return all(i in dims or a[i] == b[i] for i in range(len(a)))


def _outer_name(names: Sequence[str], outer: Sequence[int], block: int) -> str:
    parts = []
    for name, size in zip(reversed(names[: len(outer)]), reversed(outer), strict=True):
        block, index = divmod(block, size)
        parts.append(f"{name}={index}")
    return ", ".join(reversed(parts))


def _group_lines(
    layout: MeshLayout, dims: Sequence[int], rank: int | None, width: int
) -> Iterator[str]:
    name = ", ".join(layout.dim_names[dim] for dim in dims)
    size = layout.size(*dims)
    number = layout.world_size // size
    if rank is not None:
        text = f"( ) its {name} group: "
        yield text + group_name(layout.members(rank, *dims), width - len(text))
    yield f"{name} groups: {number} of {size} rank{'s' if size > 1 else ''}"
    others = [dim for dim in range(layout.ndim) if dim not in dims]
    strides = layout.strides
    for position in elide(number, 8):
        if position is None:
            yield f"  {_DOTS}"
            continue
        first, rest = 0, position
        for dim in reversed(others):
            rest, index = divmod(rest, layout.shape[dim])
            first += index * strides[dim]
        yield f"  {group_name(layout.members(first, *dims), width - 2)}"


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
        state=runtime.state.value,
        rank=place.rank,
        world_size=layout.world_size,
        coordinate=dict(zip(layout.dim_names, place.coordinate, strict=True)),
        groups={name: layout.members(place.rank, name) for name in layout.dim_names},
        dp_partition=place.dp_partition,
        tp_size=place.tp_size,
        node=node,
        device=str(runtime.device) if own and opened else None,
    )


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
        parts.append("mesh built" if hold.cache.is_built else "mesh not built")
    return ", ".join(parts)
