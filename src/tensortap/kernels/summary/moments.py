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
    "join",
]

COUNT, NAN, POSINF, NEGINF, ZEROS, EDGE, MIN, MAX, MEAN, M2, L1, DIGEST = range(12)
"""Fields of a record."""


@compiled(fastmath=REORDER)
def _sum(values: Any, n: int) -> Any:
    """Return the sum, the sum of magnitudes and the number of zeros; sums are not finite if a value is not."""
    total = 0.0
    size = 0.0
    zeros = np.int32(0)
    for i in range(n):
        x = np.float64(values[i])
        total += x
        size += abs(x)
        zeros = np.int32(zeros + np.int32(values[i] == 0))
    return total, size, zeros


@compiled(fastmath={*REORDER, "nnan"})
def _spread(values: Any, n: int, mean: float) -> Any:
    low = high = values[0]
    m2 = 0.0
    for i in range(n):
        x = values[i]
        low = lesser(low, x)
        high = greater(high, x)
        distance = np.float64(x) - mean
        m2 += distance * distance
    return np.float64(low), np.float64(high), m2


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
def add_moments(values: Any, n: int, edge: float, marked: Any, ordinary: Any, out: Any) -> Any:
    """Add the row to `out`; return its greatest magnitude and whether it may have other than ordinary elements.

    If it may, `marked` holds the row with what the sketch adds in their place.
    """
    low = high = 0.0
    total, size, zeros = _sum(values, n)
    clean = size < edge  # false for NaN, too
    if not clean:
        n = _part_ordinary(values, n, edge, marked, ordinary, out)
        values = ordinary
        total, size, zeros = _sum(values, n)
    if n > 0:
        low, high, m2 = _spread(values, n, total / n)
        join(out, float(n), total / n, m2, low, high)
        out[L1] += size
        out[ZEROS] += zeros
    return max(-low, high), not clean
