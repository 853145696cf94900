"""Aligns two sequences, so that an added or missing element does not shift the others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Matched", "best_alignment"]

Matched = tuple[int | None, int | None]
"""Positions in both sequences; None where one has no counterpart."""

_LARGEST = 4_000_000
"""Cells of the table; longer sequences are aligned in pieces."""


def best_alignment(scores: npt.NDArray[np.int64]) -> list[Matched]:
    """Return the alignment in order with the largest sum of scores, by dynamic programming.

    scores: for each element of the first sequence, how well it matches each of the second; 0 is no match.

    >>> best_alignment(np.array([[2, 0, 0], [0, 0, 2]]))
    [(0, 0), (None, 1), (1, 2)]
    """
    rows, columns = scores.shape
    if rows * columns > _LARGEST:
        half = rows // 2, columns // 2
        later = best_alignment(scores[half[0] :, half[1] :])
        return [
            *best_alignment(scores[: half[0], : half[1]]),
            *((_moved(one, half[0]), _moved(two, half[1])) for one, two in later),
        ]
    total = np.zeros((rows + 1, columns + 1), np.int64)
    for row in range(rows - 1, -1, -1):
        diagonal = np.where(scores[row] > 0, scores[row] + total[row + 1, 1:], 0)
        best = np.maximum(diagonal, total[row + 1, :-1])
        total[row, :-1] = np.maximum.accumulate(best[::-1])[::-1]
    found: list[Matched] = []
    row = column = 0
    while row < rows and column < columns:
        here = scores[row, column]
        if here > 0 and total[row, column] == here + total[row + 1, column + 1]:
            found.append((row, column))
            row, column = row + 1, column + 1
        elif total[row, column] == total[row + 1, column]:
            found.append((row, None))
            row += 1
        else:
            found.append((None, column))
            column += 1
    return [*found, *((each, None) for each in range(row, rows)), *((None, each) for each in range(column, columns))]


def _moved(position: int | None, by: int) -> int | None:
    return None if position is None else position + by
