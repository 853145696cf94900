"""The size of a sketch: how many sums it has, and how a smaller one follows from a larger one.

A sketch is a vector of signed bucket sums. The sum of two buckets is the sum of one bucket that holds the elements of
both, so adding neighbours gives a sketch of half the size. Neighbours are added because the elements of one position in
a row of the definition fall into every other bucket. Adding bucket 64 to bucket 0 would leave only half of the buckets
to them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.errors import UsageError

__all__ = ["FULL", "SIZES", "check_size", "fold", "of_one_size"]

FULL = 256
"""The sums that the definition of the summary has."""
SIZES = (32, 64, 128, FULL)
"""The sizes that a run may have."""

Matrix = npt.NDArray[np.float32]


def check_size(size: Any) -> int:
    """Return the size; raise UsageError if a run cannot have it."""
    if type(size) is not int or size not in SIZES:
        raise UsageError(f"sketch: {size!r} is not a size of sketches; there are {', '.join(map(str, SIZES))}")
    return size


def fold(sketches: Matrix, size: int) -> Matrix:
    """Return the rows of a matrix with `size` sums each, which must divide the number of their sums.

    >>> fold(np.arange(8, dtype=np.float32).reshape(1, 8), 4).tolist()
    [[1.0, 5.0, 9.0, 13.0]]
    """
    count, before = sketches.shape
    if before == size:
        return sketches
    if not before or before % size:
        raise UsageError(f"sketches of {before} buckets cannot be folded to {size}")
    with np.errstate(invalid="ignore", over="ignore"):  # sketches may have overflowed
        folded: Matrix = sketches.reshape(count, size, before // size).sum(axis=2, dtype=np.float64).astype(np.float32)
    return folded


def of_one_size(matrices: list[Matrix]) -> list[Matrix]:
    """Return the sketches of several runs or ranks in the size of the smallest."""
    size = min((matrix.shape[1] for matrix in matrices if matrix.size), default=FULL)
    return [fold(matrix, size) if matrix.size else matrix for matrix in matrices]
