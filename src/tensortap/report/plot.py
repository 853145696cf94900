"""Draws a column of numbers: as a picture, or in dots on the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from tensortap.errors import MissingDependency, UsageError
from tensortap.report import output

__all__ = ["Series", "check", "png", "terminal"]

_FORMATS = (".png", ".pdf", ".svg")
_LARGEST = 1e300  # matplotlib's margins need some room above
_ROWS = 10
_NARROWEST, _WIDEST = 30, 120
# A braille sign has 2 × 4 dots; the bit of each, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800


@dataclass(frozen=True)
class Series:
    """Numbers in order, and what each of them is of."""

    label: str
    names: Sequence[str]
    values: Sequence[float]


def check(path: Path) -> None:
    """Fails now where `png` would fail after the work is done."""
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"{path}: a picture ends in {', '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise MissingDependency("pictures are drawn by matplotlib: pip install 'tensortap[plot]'")
    output.check(path)


def png(path: Path, series: Sequence[Series], title: str) -> None:
    """A picture with one panel for each series; what is not finite is marked below the line."""
    check(path)
    figures = import_module("matplotlib.figure")  # not pyplot: no window system, no state of its own
    figure = figures.Figure(figsize=(10, 3 * max(1, len(series))), layout="constrained")
    axes = figure.subplots(max(1, len(series)), squeeze=False)[:, 0]
    for axis, each in zip(axes, series, strict=False):
        finite = [value if abs(value) < _LARGEST else math.nan for value in each.values]
        axis.plot(range(len(finite)), finite, marker=".", linewidth=0.8)
        lost = [place for place, value in enumerate(each.values) if not abs(value) < _LARGEST]
        if lost:
            axis.plot(lost, [0.02] * len(lost), "rx", transform=axis.get_xaxis_transform(), label="not finite")
            axis.legend()
        axis.set_title(f"{each.label}: {title}")
        axis.set_xlabel("file, in order")
        axis.ticklabel_format(axis="y", useOffset=False)  # a cosine of 0.99999 must not read as "0.0"
        axis.grid(alpha=0.3)
    with output.opened(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), metadata={})


def terminal(series: Series, title: str, width: int = 80) -> list[str]:
    """Lines of text. Several values that fall into one column of dots show as the range that they span.

    >>> print("\\n".join(terminal(Series("tensors", ["a", "b"], [0.0, 1.0]), "meanA", 40)))   # doctest: +SKIP
    """
    finite = [value for value in series.values if math.isfinite(value)]
    lost = len(series.values) - len(finite)
    lines = [f"{series.label}: {title}, {len(series.values)} files{f', {lost} not finite' if lost else ''}"]
    if not finite:
        return [*lines, "  no finite number to draw"]
    low, high = min(finite), max(finite)
    labels = [f"{high:.6g}", f"{low:.6g}"]
    margin = max(map(len, labels))
    columns = max(_NARROWEST, min(width, _WIDEST) - margin - 4)
    cells = min(columns, max(1, -(-len(series.values) // 2)))
    grid = _grid(series.values, low, high, cells)
    for number, row in enumerate(grid):
        label = labels[0] if number == 0 else labels[1] if number == len(grid) - 1 else ""
        lines.append(f"{label:>{margin}} ┤{''.join(chr(_BLANK + bits) for bits in row)}")
    lines.append(f"{'':>{margin}} └{'─' * cells}")
    lowest = series.values.index(low)
    highest = series.values.index(high)
    lines.append(f"lowest  {low:.9g} at {series.names[lowest]}")
    lines.append(f"highest {high:.9g} at {series.names[highest]}")
    return lines


def _grid(values: Sequence[float], low: float, high: float, cells: int) -> list[list[int]]:
    """Braille bits by row and cell."""
    across, down = 2 * cells, 4 * _ROWS
    grid = [[0] * cells for _ in range(_ROWS)]
    spans: dict[int, tuple[int, int]] = {}
    for place, value in enumerate(values):
        if not math.isfinite(value):
            continue
        x = place if len(values) <= across else place * across // len(values)
        # Halved first: the span of the greatest numbers is no number.
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
        y = down - 1 - round(share * (down - 1))
        top, bottom = spans.get(x, (y, y))
        spans[x] = min(top, y), max(bottom, y)
    for x, (top, bottom) in spans.items():
        for y in range(top, bottom + 1):
            grid[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    return grid
