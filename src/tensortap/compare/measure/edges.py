"""Elements at the edge of their dtype's range, as masks have: beside them, all others drown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Bools, Side
from tensortap.core import dtypes
from tensortap.core.records import Difference
from tensortap.kernels import difference

__all__ = ["as_infinite", "has_edges", "without_edges"]

Array = npt.NDArray[Any]


def has_edges(reference: Side, candidate: Side, alignment: Alignment) -> Bools:
    """Return for each pair whether a side has elements at the edge of its dtype's range."""
    if not len(alignment.reference):
        return np.zeros(0, bool)
    found: Bools = (reference.edge[alignment.reference] > 0) | (candidate.edge[alignment.candidate] > 0)
    return found


def without_edges(
    measured: Difference, ours: Array, theirs: Array, rtol: float | None, atol: float | None
) -> Difference:
    """Measure a pair again without the elements at the edge of the range or infinite, which would drown the others. If
    these are not the same elements on both sides, return `measured` unchanged."""
    again = difference(as_infinite(ours), as_infinite(theirs), rtol=rtol, atol=atol).difference
    return measured if again.max_abs == np.inf else replace(again, equal=measured.equal)


def as_infinite(array: Array) -> Array:
    """Return the array with numbers at the edge of the dtype's range made infinite."""
    edge = dtypes.edge_of(dtypes.name_of(array.dtype))
    wide = array.astype(np.float64 if array.dtype == np.float64 else np.float32)
    wide[wide >= edge] = np.inf
    wide[wide <= -edge] = -np.inf
    return wide
