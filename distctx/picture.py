"""Pictures of a layout: one grid, drawn as text for a terminal and as HTML for a notebook.

No torch here, and nobody is asked. A picture costs what it shows, not what the world has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import attrs

from distctx.layout import Dim, MeshLayout

__all__ = ["Picture", "code", "draw", "elide", "group_name"]

#: What stands for what is left out.
_DOTS = "…"

#: Colours that can be read on a light and on a dark page alike: they only tint what is there.
_GRID = "border-collapse:collapse;margin:2px 0;color:inherit;font:inherit"
_CELL = "border:1px solid rgba(128,128,128,.35);padding:1px 6px;text-align:right"
_LABEL = "border:none;padding:1px 6px;text-align:right;opacity:.65;font-weight:normal"
_MARKS = {
    "[]": "background:rgba(240,120,0,.45);font-weight:bold",
    "()": "background:rgba(60,130,246,.30)",
}


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


def code(text: str) -> str:
    """A piece of text as HTML."""
    return f"<code>{escape(text)}</code>"


def draw(
    layout: MeshLayout,
    rank: int | None = None,
    groups: Sequence[Dim] = (),
    width: int = 80,
    height: int = 40,
) -> Picture:
    """A layout as a grid of ranks: the last dim to the right, the one before it down, the rest
    stacked.

    Args:
        layout: with every size known.
        rank: marked ``[13]``; its group along ``groups`` is marked ``(5)``.
        groups: the dims of the groups that are listed below.
        width: columns to stay within.
        height: lines to stay within, roughly.

    Raises:
        LayoutError: a size is -1, or there is no such rank or dim.
    """
    coordinate = None if rank is None else layout.coordinate(rank)
    dims = layout.dims(groups) if groups else ()
    *outer, down, right = (1,) * max(0, 2 - layout.ndim) + layout.shape
    names = layout.dim_names
    digits = len(str(layout.world_size - 1))
    label = "" if layout.ndim < 2 else f"{names[-2]}={down - 1}"
    fits = (width - len(label) - 2) // (digits + 3)
    # Where the own rank stands is never left out.
    at = (None,) * 3 if rank is None else _position(rank, down, right)
    columns = elide(right, fits if right <= fits else max(fits - 2, 3), at[2])
    blocks = elide(math.prod(outer), max(height // (min(down, 8) + 3), 2), at[0])
    rows = elide(down, max(height // len(blocks) - 2, 3), at[1])

    def cell(here: int) -> str:
        if here == rank:
            return f"[{here}]"
        if coordinate is not None and dims:
            other = layout.coordinate(here)
            if all(i in dims or other[i] == coordinate[i] for i in range(layout.ndim)):
                return f"({here})"
        return f"{here} "

    def line(block: int, row: int | None) -> Line:
        if row is None:
            return Line(_DOTS, ())
        base = (block * down + row) * right
        cells = [_DOTS if column is None else cell(base + column) for column in columns]
        return Line(f"{names[-2]}={row}" if layout.ndim > 1 else "", tuple(cells))

    title = " × ".join(f"{n}={size}" for n, size in zip(names, layout.shape, strict=True))
    notes = [] if coordinate is None else [f"[{rank}] rank {rank} at {layout.name_of(coordinate)}"]
    if groups:
        notes += [*([""] if notes else []), *_group_lines(layout, dims, rank, width)]
    return Picture(
        title=f"{title}: {layout.world_size} rank{'s' if layout.world_size > 1 else ''}",
        head=Line(f"{names[-1]}=", tuple(_DOTS if c is None else f"{c} " for c in columns)),
        blocks=tuple(
            None
            if block is None
            else Block(
                _outer_name(names, outer, block) if outer else "",
                tuple(line(block, row) for row in rows),
            )
            for block in blocks
        ),
        notes=tuple(notes),
        cell_width=digits + 2,
        label_width=len(label) + 1,
    )


def _position(rank: int, down: int, right: int) -> tuple[int, int, int]:
    """Block, row and column of a rank."""
    rest, column = divmod(rank, right)
    block, row = divmod(rest, down)
    return block, row, column


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
class Line:
    """A label, and the cells to its right; none where lines are left out."""

    label: str
    cells: tuple[str, ...]


@attrs.frozen
class Block:
    """The last two dims, at one place along the others."""

    name: str
    lines: tuple[Line, ...]


@attrs.frozen
class Picture:
    """A grid that is laid out and elided; ``str()`` of it is text, ``html()`` the same for a
    notebook."""

    title: str
    head: Line
    #: None stands for blocks left out.
    blocks: tuple[Block | None, ...]
    notes: tuple[str, ...]
    cell_width: int
    label_width: int

    def __str__(self) -> str:
        lines = [self.head.label.rjust(self.label_width) + self._cells(self.head)]
        for block in self.blocks:
            if block is None:
                lines += ["", _DOTS]
                continue
            lines += ["", block.name] if block.name else []
            lines += [
                line.label.ljust(self.label_width) + self._cells(line) for line in block.lines
            ]
        notes = ["", *self.notes] if self.notes else []
        return "\n".join(line.rstrip() for line in [self.title, "", *lines, *notes])

    def _cells(self, line: Line) -> str:
        return " ".join(
            _DOTS.center(self.cell_width)
            if cell == _DOTS and line is not self.head
            else cell.rjust(self.cell_width)
            for cell in line.cells
        )

    def html(self, heading: str = "") -> str:
        """One static element: no script, no style sheet, every word escaped.

        Args:
            heading: a line above the picture.
        """
        parts = [f"<div>{code(heading)}</div>"] if heading else []
        parts.append(f"<div>{escape(self.title)}</div>")
        parts.append('<div style="display:flex;flex-wrap:wrap;gap:2px 18px;align-items:end">')
        head = self._html_line(self.head)
        for block in self.blocks:
            if block is None:
                parts.append(f"<div>{_DOTS}</div>")
                continue
            rows = [self._html_line(line) for line in block.lines]
            name = f"<div>{escape(block.name)}</div>" if block.name else ""
            parts.append(f'<div>{name}<table style="{_GRID}">{head}{"".join(rows)}</table></div>')
        parts.append("</div>")
        if self.notes:
            text = escape("\n".join(self.notes))
            parts.append(f'<div style="white-space:pre-wrap">{text}</div>')
        style = "font-family:monospace;font-size:90%;line-height:1.35"
        return f'<div style="{style}">{"".join(parts)}</div>'

    def _html_line(self, line: Line) -> str:
        tag = "th" if line is self.head else "td"
        cells = [f'<th style="{_LABEL}">{escape(line.label)}</th>']
        for cell in line.cells:
            mark = _MARKS.get(cell[0] + cell[-1], "")
            style = _LABEL if tag == "th" else f"{_CELL};{mark}" if mark else _CELL
            cells.append(f'<{tag} style="{style}">{escape(cell.strip())}</{tag}>')
        return f"<tr>{''.join(cells)}</tr>"
