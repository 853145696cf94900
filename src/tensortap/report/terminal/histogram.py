"""A histogram as lines of text: a bar for each range of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len

from tensortap.report.wording import count, number

__all__ = ["bars"]

_MOST_LINES = 16
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_NARROWEST = 8


def bars(counts: npt.NDArray[np.int64], edges: npt.NDArray[np.float64], width: int = 80) -> list[str]:
    """Return one line per bin, or per group of neighbouring bins if there are more than 16.

    >>> for line in bars(np.array([1, 4]), np.array([0.0, 1.0, 2.0]), 40):
    ...     print(line)
        0 … 1.000 │█████▊ 1
    1.000 … 2.000 │███████████████████████ 4
    """
    together = math.ceil(len(counts) / _MOST_LINES)
    starts = np.arange(0, len(counts), together)
    sums = np.add.reduceat(counts, starts)
    ends = [*edges[starts].tolist(), float(edges[-1])]
    labels = _aligned([f"{number(end)}" for end in ends])
    ranges = [f"{low} … {high} │" for low, high in pairwise(labels)]
    said = [count(int(each)) for each in sums]
    room = max(_NARROWEST, width - cell_len(ranges[0]) - 1 - max(map(len, said)))
    most = max(1, int(sums.max()))
    return [
        f"{label}{_bar(int(each) / most * room)} {text}".rstrip()
        for label, each, text in zip(ranges, sums, said, strict=True)
    ]


def _bar(cells: float) -> str:
    """Return a bar of `cells` terminal cells, to an eighth; any value above zero is visible."""
    eighths = max(round(8 * cells), 1 if cells > 0 else 0)
    return _EIGHTHS[8] * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _aligned(labels: Sequence[str]) -> list[str]:
    widest = max(map(len, labels))
    return [label.rjust(widest) for label in labels]
