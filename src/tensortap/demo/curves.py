"""Two loss curves side by side as bars, and a sentence that compares them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

__all__ = ["apart", "draw"]

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ROWS = 5
_LABEL = 8  # cells on the left, for the numbers
_GAP = 4
_WIDEST = 3  # cells a step


def draw(reference: Sequence[float], candidate: Sequence[float], width: int) -> list[Text]:
    """Return lines of at most `width` cells, with both curves on one scale. A non-finite loss is a cross."""
    room = max(8, (width - _LABEL - _GAP) // 2)
    curves = [_thinned(losses, room) for losses in (reference, candidate)]
    cells = max(1, min(_WIDEST, room // max(map(len, curves))))
    finite = [loss for losses in curves for loss in losses if math.isfinite(loss)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def line(label: str, left: Text, right: Text) -> Text:
        left.pad_right(room + _GAP - len(left))
        whole = Text(f"  {label}".ljust(_LABEL), "dim") + left + right
        whole.rstrip()
        return whole

    lines = [line("loss", Text("reference", "bold"), Text("candidate", "bold"))]
    for row in reversed(range(_ROWS)):
        label = f"{high:.2f}" if row == _ROWS - 1 else f"{low:.2f}" if not row else ""
        lines.append(line(label, *(_bars(losses, row, low, high, cells) for losses in curves)))
    lines.append(line("last", *(Text(f"{losses[-1]:.5f}") for losses in (reference, candidate))))
    return lines


def apart(reference: Sequence[float], candidate: Sequence[float]) -> str:
    """Return a sentence about the difference of two loss curves.

    >>> apart([3.0, 2.0], [3.0, 2.0])
    'The losses are equal to the last bit.'
    >>> apart([3.0, 2.0], [3.0, 2.0003])
    'The losses agree to 3 digits: they alone would alarm nobody.'
    >>> apart([3.0, 2.0], [3.0, 2.01])
    'The losses differ by 0.5 % at most: they alone would alarm nobody.'
    """
    for step, loss in enumerate(candidate):
        if not math.isfinite(loss):
            return f"The candidate's loss is not finite from step {step} on: something is wrong, but what?"
    worst = max(abs(ours - theirs) / abs(ours) for ours, theirs in zip(reference, candidate, strict=True))
    if not worst:
        return "The losses are equal to the last bit."
    if worst < 0.001:
        return f"The losses agree to {math.floor(-math.log10(worst))} digits: they alone would alarm nobody."
    rest = "they alone would alarm nobody." if worst < 0.02 else "something is wrong, but what?"
    return f"The losses differ by {100 * worst:.1f} % at most: {rest}"


def _thinned(losses: Sequence[float], most: int) -> list[float]:
    """Return at most `most` numbers: means of neighbours if there are more."""
    share = math.ceil(len(losses) / most)
    groups = [losses[at : at + share] for at in range(0, len(losses), share)]
    return [sum(group) / len(group) for group in groups]


def _bars(losses: Sequence[float], row: int, low: float, high: float, cells: int) -> Text:
    """Return one row of the bars, counted from below; the lowest loss still has a visible bar."""
    said = Text()
    for loss in losses:
        if not math.isfinite(loss):
            said.append(("×" if not row else " ") * cells, "red")
            continue
        height = 2 + (loss - low) / (high - low or 1.0) * (8 * _ROWS - 2)
        said.append(_EIGHTHS[max(0, min(8, round(height) - 8 * row))] * cells, "cyan")
    return said
