"""Draw a column of numbers with dots on the terminal. `plot_picture` draws the same as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tensortap.report.terminal.shortening import cut
from tensortap.report.wording import plural

__all__ = ["Series", "badness_of", "lines_of_layers", "terminal", "terminal_of_layers"]

_ROWS = 10
_NARROWEST, _WIDEST = 30, 120
_MOST_LAYERS = 20
_LAYER = 32
_DIGITS, _MOST_DIGITS = 6, 10
_BARS = "▁▂▃▄▅▆▇█"
# A braille sign has 2 × 4 dots; the bit of each, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800


@dataclass(frozen=True)
class Series:
    """Numbers in order, each with its name, layer and micro step."""

    label: str
    names: Sequence[str]
    values: Sequence[float]
    layers: Sequence[str] = ()
    """The layer of each number; the names if there are none."""
    steps: Sequence[int] = ()
    """The micro step of each number; 0 if there are none."""
    panel: str = ""
    """Series of the same panel share a picture."""
    member: str = ""
    """The name of the series among those of its panel."""

    @property
    def points(self) -> list[tuple[int, str, float]]:
        """(micro step, layer, value) of each number. Further calls of a layer in a micro step have a number."""
        calls: dict[tuple[int, str], int] = {}
        found = []
        for at, value in enumerate(self.values):
            step, layer = self.steps[at] if self.steps else 0, (self.layers or self.names)[at]
            calls[step, layer] = call = calls.get((step, layer), 0) + 1
            found.append((step, layer if call == 1 else f"{layer} #{call}", value))
        return found


Line = list[tuple[int, float]]
"""(micro step, value) of one layer."""


def lines_of_layers(series: Series) -> dict[str, Line]:
    """Return the numbers of each layer over the micro steps, layers in order of first appearance."""
    found: dict[str, Line] = {}
    for step, layer, value in series.points:
        found.setdefault(layer, []).append((step, value))
    return found


def badness_of(column: str) -> Callable[[Sequence[float]], float]:
    """Return a score of a layer's numbers: higher for a low cosine, a large difference, else a wide range."""

    def of(values: Sequence[float]) -> float:
        finite = [value for value in values if math.isfinite(value)]
        if len(finite) < len(values):
            return math.inf
        if column == "cosine similarity":
            return -min(finite)
        if " - " in column:
            return max(map(abs, finite))
        return max(finite) / 2 - min(finite) / 2  # halved first: the range of the greatest numbers is infinite

    return of


def terminal(series: Series, title: str, width: int = 80) -> list[str]:
    """Draw all numbers in order, as lines of text. Values in one column of dots appear as the range that they span.

    >>> print("\\n".join(terminal(Series("tensors", ["a", "b"], [0.0, 1.0]), "meanA", 40)))   # doctest: +SKIP
    """
    finite = [value for value in series.values if math.isfinite(value)]
    lost = len(series.values) - len(finite)
    lines = [f"{series.label}: {title}, {len(series.values)} files{f', {lost} not finite' if lost else ''}"]
    if not finite:
        return [*lines, "  no finite number to draw"]
    low, high = min(finite), max(finite)
    digits = _digits(low, high)
    labels = [f"{high:.{digits}g}", f"{low:.{digits}g}"]
    margin = max(map(len, labels))
    columns = max(_NARROWEST, min(width, _WIDEST) - margin - 4)
    cells = min(columns, max(1, -(-len(series.values) // 2)))
    grid = _grid(series.values, low, high, cells)
    for line, row in enumerate(grid):
        label = labels[0] if line == 0 else labels[1] if line == len(grid) - 1 else ""
        lines.append(f"{label:>{margin}} ┤{''.join(chr(_BLANK + bits) for bits in row)}")
    lines += [f"{'':>{margin}} {line}" for line in _ruler(series, cells, columns)]
    lowest = series.values.index(low)
    highest = series.values.index(high)
    lines.append(f"lowest  {low:.9g} at {series.names[lowest]}")
    lines.append(f"highest {high:.9g} at {series.names[highest]}")
    return lines


def terminal_of_layers(series: Series, title: str, width: int = 80) -> list[str]:
    """Draw each layer as one line of bars over the micro steps; only the worst layers if there are many."""
    layers = lines_of_layers(series)
    bad = badness_of(title)
    worst = sorted(layers, key=lambda layer: bad([value for _, value in layers[layer]]), reverse=True)[:_MOST_LAYERS]
    chosen = [layer for layer in layers if layer in set(worst)]
    finite = [value for layer in chosen for _, value in layers[layer] if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    names = cut(chosen, _LAYER)
    margin = max(map(len, names), default=0)
    digits = _digits(low, high)
    ends = {layer: f"{layers[layer][0][1]:.{digits}g} → {layers[layer][-1][1]:.{digits}g}" for layer in chosen}
    room = max(6, min(width, _WIDEST) - margin - 6 - max(map(len, ends.values()), default=0))
    lines = [f"{series.label}: {title} over micro steps, {plural(len(layers), 'layer')}"]
    lines.append(f"  {'':{margin}}  ▁ {low:.{digits}g}  █ {high:.{digits}g}")
    for layer, name in zip(chosen, names, strict=True):
        values = [value for _, value in layers[layer]]
        shown = [values[at * len(values) // room] for at in range(room)] if len(values) > room else values
        bars = "".join(_bar(value, low, high) for value in shown)
        lines.append(f"  {name:{margin}}  {bars}  {ends[layer]}")
    if len(chosen) < len(layers):
        lines.append(f"  {len(layers) - len(chosen)} more layers differ less")
    return lines


def _digits(low: float, high: float) -> int:
    """Return the number of digits that distinguish the numbers of a range: cosines of a right pair begin with six
    nines.
    """
    spread = high / 2 - low / 2  # halved first, as in `_bar`
    if not spread:
        return _DIGITS
    needed = math.ceil(math.log10(max(abs(low), abs(high)) / 2) - math.log10(spread)) + 2
    return min(_MOST_DIGITS, max(_DIGITS, needed))


def _ruler(series: Series, cells: int, width: int) -> list[str]:
    """Return the axis: a tick where each further micro step begins, with its number below if there is room."""
    begins: dict[int, int] = {}
    for at, (step, _, _) in enumerate(series.points):
        begins.setdefault(step, at if len(series.values) <= 2 * cells else at * 2 * cells // len(series.values))
    ticks = {x // 2: step for step, x in reversed(begins.items())}
    if len(begins) < 2 or len(ticks) < len(begins):
        return [f"└{'─' * cells}"]
    numbers = ""
    for cell, step in sorted(ticks.items()):
        if cell + 1 > len(numbers) or not numbers:
            numbers = f"{numbers:{cell + 1}}{step}"
    axis = "".join("┴" if cell and cell in ticks else "─" for cell in range(cells))
    label = "  micro step"
    return [f"└{axis}", f"{numbers}{label if len(numbers) + len(label) <= width else ''}"]


def _bar(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "×"
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]


def _grid(values: Sequence[float], low: float, high: float, cells: int) -> list[list[int]]:
    """Return the Braille bits by row and cell."""
    across, down = 2 * cells, 4 * _ROWS
    grid = [[0] * cells for _ in range(_ROWS)]
    spans: dict[int, tuple[int, int]] = {}
    for place, value in enumerate(values):
        if not math.isfinite(value):
            continue
        x = place if len(values) <= across else place * across // len(values)
        # Halved first: the span of the greatest numbers is infinite.
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
        y = down - 1 - round(share * (down - 1))
        top, bottom = spans.get(x, (y, y))
        spans[x] = min(top, y), max(bottom, y)
    for x, (top, bottom) in spans.items():
        for y in range(top, bottom + 1):
            grid[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    return grid
