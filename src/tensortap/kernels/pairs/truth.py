"""Distances of two tensors from a third one that is known to be exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["TruthMeasure", "measure_truth"]

_LARGEST = 1e37
"""Larger numbers are those of masks, which differ by dtype."""

_FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class TruthMeasure:
    """Sums of squares over all elements that are finite on every side; they add up over calls."""

    elements: int
    truth: float
    reference: float
    """Sum of (reference - truth) ** 2."""
    candidate: float
    """Sum of (candidate - truth) ** 2."""
    lean: float
    """Sum over rows of (candidate - reference) / (candidate + reference), from the sums of squares of each row.

    Every row counts alike, from -1, where only the reference is off, to 1. Rows run along the last dimension: their
    elements share rounding. If few rows are off, each element is a row."""
    spread: float
    """Sum of the squares of these numbers."""

    def __add__(self, other: TruthMeasure) -> TruthMeasure:
        pairs = zip(self._values(), other._values(), strict=True)
        return TruthMeasure(*(left + right for left, right in pairs))  # type: ignore[arg-type]

    def _values(self) -> tuple[float, ...]:
        return self.elements, self.truth, self.reference, self.candidate, self.lean, self.spread


def measure_truth(truth: npt.NDArray[Any], reference: npt.NDArray[Any], candidate: npt.NDArray[Any]) -> TruthMeasure:
    """Measure the squared distances of both sides from the truth.

    >>> found = measure_truth(np.array([1.0, 2.0]), np.array([1.0, 2.5]), np.array([1.5, 2.5]))
    >>> found.reference, found.candidate
    (0.25, 0.5)
    """
    exact, ours, theirs = (np.asarray(each, np.float64) for each in (truth, reference, candidate))
    usable = np.isfinite(ours) & np.isfinite(theirs) & (np.abs(exact) < _LARGEST) & (np.abs(ours) < _LARGEST)
    exact, of_reference, of_candidate = (np.where(usable, each, 0.0) for each in (exact, ours - exact, theirs - exact))
    rows = [each**2 for each in (of_reference, of_candidate)]
    if exact.ndim > 1 and _count_off(rows) >= _FEW_ROWS:
        rows = [each.sum(axis=-1) for each in rows]
    both = rows[0] + rows[1]
    lean = np.divide(rows[1] - rows[0], both, out=np.zeros_like(both), where=both > 0)
    return TruthMeasure(
        int(usable.sum()),
        float((exact**2).sum()),
        float(rows[0].sum()),
        float(rows[1].sum()),
        float(lean.sum()),
        float((lean**2).sum()),
    )


def _count_off(sides: list[npt.NDArray[np.float64]]) -> int:
    """Return the number of rows in which at least one side is off. The gradients of most tokens may be zero, and show
    nothing.
    """
    return int((sides[0].any(axis=-1) | sides[1].any(axis=-1)).sum())
