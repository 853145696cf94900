"""Aligned columns that fit a given width, without boxes: alignment and a dim header are enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from tensortap.report.terminal.shortening import cut

__all__ = ["TableColumn", "fit", "lines"]

GAP = 2


@dataclass(frozen=True)
class TableColumn:
    """One column of finished cells, and its behaviour in a narrow table."""

    title: str
    cells: Sequence[str]
    left: bool = False
    """Names are aligned left, numbers right."""
    least: int | None = None
    """Least width to which cells may be cut in the middle; None forbids cutting."""
    optional: int = 0
    """0 is always shown; of the others, the greatest number is dropped first."""
    style: str = ""
    styles: Sequence[str] = ()
    """One for each cell, if they differ."""

    @property
    def natural(self) -> int:
        return max(map(cell_len, (self.title, *self.cells)))

    @property
    def narrowest(self) -> int:
        return self.natural if self.least is None else min(self.natural, max(self.least, cell_len(self.title)))


def fit(columns: Sequence[TableColumn], width: int | None) -> list[tuple[TableColumn, int]]:
    """Return the columns that fit, with their widths; without a width, all of them, uncut."""
    if width is None:
        return [(column, column.natural) for column in columns]
    narrowest = {column.title: column.narrowest for column in columns}
    chosen = {column.title for column in columns if not column.optional}
    room = width + GAP - sum(narrowest[title] + GAP for title in chosen)
    for column in sorted((c for c in columns if c.optional), key=lambda c: c.optional):
        if narrowest[column.title] + GAP > room:
            break  # a narrower column of less importance must not take its place
        chosen.add(column.title)
        room -= narrowest[column.title] + GAP
    result = []
    for column in columns:
        if column.title not in chosen:
            continue
        extra = max(0, min(room, column.natural - narrowest[column.title]))
        room -= extra
        result.append((column, narrowest[column.title] + extra))
    return _squeezed(result, -room)


def _squeezed(columns: list[tuple[TableColumn, int]], excess: int) -> list[tuple[TableColumn, int]]:
    """Shrink the widest columns if the terminal is too narrow even for the least widths."""
    widths = [width for _, width in columns]
    while excess > 0 and max(widths) > 3:
        widest = widths.index(max(widths))
        widths[widest] -= 1
        excess -= 1
    return [(column, width) for (column, _), width in zip(columns, widths, strict=True)]


def lines(columns: Sequence[TableColumn], width: int | None, indent: int = 0) -> list[Text]:
    """Return the header and the rows as lines of at most `width` cells."""
    fitted = fit(columns, None if width is None else width - indent)
    header = Text(" " * indent + _joined([column.title for column, _ in fitted], fitted), "dim")
    rows = [header]
    cells = [cut(column.cells, size) for column, size in fitted]
    for place in range(len(columns[0].cells)):
        row = Text(" " * indent)
        for at, (column, size) in enumerate(fitted):
            cell = _padded(cells[at][place], column, size) + " " * GAP * (at < len(fitted) - 1)
            row.append(cell, column.styles[place] if column.styles else column.style)
        row.rstrip()
        rows.append(row)
    return rows


def _joined(cells: Sequence[str], fitted: Sequence[tuple[TableColumn, int]]) -> str:
    padded = [_padded(cut([cell], size)[0], column, size) for cell, (column, size) in zip(cells, fitted, strict=True)]
    return (" " * GAP).join(padded).rstrip()


def _padded(cell: str, column: TableColumn, width: int) -> str:
    space = " " * (width - cell_len(cell))
    return cell + space if column.left else space + cell
