"""Masks that differ by design: masked elements are the lowest number of a dtype, which is another one in each dtype.

If the dtypes of the two sides differ and each side reaches the end of its own range, these elements count as equal.
"""

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

__all__ = ["at_range_ends", "without_range_ends"]

Array = npt.NDArray[Any]


def at_range_ends(reference: Side, candidate: Side, alignment: Alignment) -> Bools:
    """Return for each pair whether its dtypes differ and both sides reach the same end of their own range."""
    left, right = alignment.reference, alignment.candidate
    if not len(left):
        return np.zeros(0, bool)
    ends = [_at_ends(side)[rows] for side, rows in ((reference, left), (candidate, right))]
    words = {word: code for code, word in enumerate({*reference.dtype.words, *candidate.dtype.words})}
    codes = [
        np.array([words[word] for word in side.dtype.words])[side.dtype.codes[rows]]
        for side, rows in ((reference, left), (candidate, right))
    ]
    found: Bools = np.any(ends[0] & ends[1], axis=1) & (codes[0] != codes[1])
    return found


def _at_ends(side: Side) -> Bools:
    """Return two columns: whether a record's least element is its dtype's lowest number, the greatest its highest."""
    known = [dtypes.range_of(word) or (np.nan, np.nan) for word in side.dtype.words]
    ends = np.array(known).reshape(-1, 2)[side.dtype.codes]
    found: Bools = np.stack([side.min == ends[:, 0], side.max == ends[:, 1]], axis=1)
    return found


def without_range_ends(
    measured: Difference, reference: Array, candidate: Array, rtol: float | None, atol: float | None
) -> Difference:
    """Measure a pair again without the elements at the ends of both ranges. If these are not the same elements on both
    sides, return `measured` unchanged."""
    again = difference(_as_infinite(reference), _as_infinite(candidate), rtol=rtol, atol=atol).difference
    return measured if again.max_abs == np.inf else replace(again, equal=False)


def _as_infinite(array: Array) -> Array:
    """Return the array with numbers at an end of the dtype's range made infinite."""
    low, high = dtypes.range_of(dtypes.name_of(array.dtype)) or (-np.inf, np.inf)
    wide = array.astype(np.float64 if array.dtype == np.float64 else np.float32)
    wide[array == array.dtype.type(low)] = -np.inf
    wide[array == array.dtype.type(high)] = np.inf
    return wide
