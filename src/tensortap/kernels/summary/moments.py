"""Counts, extremes and moments of a row, added to the record of its chunk."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensortap.kernels.jit import REORDER, compiled
from tensortap.kernels.summary.elements import ROW
from tensortap.kernels.vectors import greater, lesser

__all__ = [
    "COUNT",
    "DIGEST",
    "EDGE",
    "L1",
    "M2",
    "MAX",
    "MEAN",
    "MIN",
    "NAN",
    "NEGINF",
    "POSINF",
    "ZEROS",
    "add_moments",
    "add_sums",
    "join",
    "sums_are_exact",
]

COUNT, NAN, POSINF, NEGINF, ZEROS, EDGE, MIN, MAX, MEAN, M2, L1, DIGEST = range(12)
"""Fields of a record."""


_FAR = 1024
"""Upper bound on the ratio of a mean's square to the variance: each factor of ten costs a digit of the variance."""


@compiled(fastmath=REORDER)
def _sums(values: Any, n: int) -> Any:
    """Return the sum, the sums of squares and of magnitudes, the number of zeros, and the extremes.

    Sums are not finite if a value is not. The extremes are undefined if a value is NaN.
    """
    total = 0.0
    square = 0.0
    magnitude = 0.0
    zeros = np.int32(0)
    low = high = values[0]
    for i in range(n):
        x = np.float64(values[i])
        total += x
        square += x * x
        magnitude += abs(x)
        zeros = np.int32(zeros + np.int32(values[i] == 0))
        low = lesser(low, values[i])
        high = greater(high, values[i])
    return total, square, magnitude, np.int64(zeros), np.float64(low), np.float64(high)


@compiled()
def sums_are_exact(sums: Any, n: int) -> bool:
    """Return whether the sums of `n` values give their variance with enough digits."""
    parallel = sums[0] * (sums[0] / n)
    return bool(parallel <= _FAR * (sums[1] - parallel))


@compiled(fastmath=REORDER)
def _squared_distances(values: Any, n: int, mean: float) -> float:
    m2 = 0.0
    for i in range(n):
        distance = np.float64(values[i]) - mean
        m2 += distance * distance
    return m2


@compiled()
def _part_ordinary(values: Any, n: int, edge: float, marked: Any, ordinary: Any, out: Any) -> int:
    """Gather the ordinary elements and return their number; count the others, and mark them as the sketch adds them."""
    kept = nan = posinf = neginf = beyond = 0
    low, high = np.inf, -np.inf
    for i in range(n):  # no branches: half of a mask is -inf, in an order that no branch predictor guesses
        x = values[i]  # read first: `marked` may be the same memory
        below, above = int(x <= -edge), int(x >= edge)
        marked[i] = x if abs(x) < edge else above - below
        ordinary[kept] = x  # overwritten by the next one if it is not ordinary
        kept += int(abs(x) < edge)
        nan += int(np.isnan(x))
        posinf += int(x == np.inf)
        neginf += int(x == -np.inf)
        beyond += below + above
        low = min(low, x if np.isfinite(x) else np.inf)
        high = max(high, x if np.isfinite(x) else -np.inf)
    out[NAN] += nan
    out[POSINF] += posinf
    out[NEGINF] += neginf
    out[EDGE] += beyond - posinf - neginf
    out[MIN] = min(out[MIN], low)
    out[MAX] = max(out[MAX], high)
    for i in range(n, ROW):
        marked[i] = 0
    return kept


@compiled()
def join(out: Any, n: float, mean: float, m2: float, low: float, high: float) -> None:
    """Combine the moments of two parts by Chan's formula."""
    before = out[COUNT]
    total = before + n
    if n > 0:
        delta = mean - out[MEAN]
        out[M2] += m2 + delta * delta * (before / total * n)
        out[MEAN] += delta * (n / total)
        out[COUNT] = total
    out[MIN] = min(out[MIN], low)
    out[MAX] = max(out[MAX], high)


@compiled()
def add_sums(out: Any, n: int, sums: Any) -> None:
    """Add the result of `_sums` for `n` ordinary values, if `sums_are_exact`."""
    mean = sums[0] / n
    _add(out, n, mean, sums[1] - sums[0] * mean, sums)


@compiled()
def _add(out: Any, n: int, mean: float, m2: float, sums: Any) -> None:
    join(out, float(n), mean, m2, sums[4], sums[5])
    out[L1] += sums[2]
    out[ZEROS] += sums[3]


@compiled()
def add_moments(values: Any, n: int, edge: float, marked: Any, ordinary: Any, out: Any) -> Any:
    """Add the row to `out`; return its greatest magnitude and whether it may have other than ordinary elements.

    If it may, `marked` holds the row with what the sketch adds in their place.
    """
    sums = _sums(values, n)
    clean = sums[2] < edge  # false for NaN, too
    if not clean:
        n = _part_ordinary(values, n, edge, marked, ordinary, out)
        if n == 0:
            return 0.0, True
        values = ordinary
        sums = _sums(values, n)
    if sums_are_exact(sums, n):
        add_sums(out, n, sums)
    else:
        mean = sums[0] / n
        _add(out, n, mean, _squared_distances(values, n, mean), sums)
    return max(-sums[4], sums[5]), not clean
