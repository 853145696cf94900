"""Compiled loops over pairs of 64-bit integers, which float64 would round before the subtraction; `rows` calls them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from tensortap.kernels.jit import compiled
from tensortap.kernels.summary.elements import CODES, ROW
from tensortap.kernels.vectors import pointer

__all__ = ["integer_gaps", "integer_place", "whole_numbers"]

_I64, _U64 = CODES["i64"], CODES["u64"]


@compiled()
def whole_numbers(codes: Any) -> Any:
    """Return whether both sides are 64-bit integers."""
    return (codes[0] == _I64 or codes[0] == _U64) and (codes[1] == _I64 or codes[1] == _U64)


@compiled()
def _integer_gap(r: Any, c: Any, r_signed: bool, c_signed: bool) -> Any:
    """Return |c - r| of two 64-bit integers, given as bits: exact until the conversion of the result."""
    r_negative, c_negative = r_signed and np.int64(r) < 0, c_signed and np.int64(c) < 0
    if r_negative == c_negative:
        return np.float64(r - c if r > c else c - r)
    if r_signed and c_signed:
        return np.float64(c - r if r_negative else r - c)
    below, above = (np.uint64(0) - r, c) if r_negative else (np.uint64(0) - c, r)
    total = below + above
    if total >= above:
        return np.float64(total)
    half = (total >> np.uint64(1)) | (total & np.uint64(1)) | np.uint64(1 << 63)  # restores the 65th bit
    return 2 * np.float64(half)


@compiled()
def integer_gaps(r_at: int, c_at: int, n: int, codes: Any, rtol: float, atol: float) -> Any:
    """Return the sum of squared differences, the greatest difference, and the number outside the tolerance."""
    r, c = carray(pointer(r_at), ROW, np.uint64), carray(pointer(c_at), ROW, np.uint64)
    gap2 = top = 0.0
    outside = 0
    for i in range(n):
        gap = _integer_gap(r[i], c[i], codes[0] == _I64, codes[1] == _I64)
        size = np.float64(np.int64(r[i])) if codes[0] == _I64 else np.float64(r[i])
        gap2 += gap * gap
        top = max(top, gap)
        outside += int(gap > atol + rtol * abs(size))
    return gap2, top, outside


@compiled()
def integer_place(r_at: int, c_at: int, n: int, codes: Any, top: float) -> Any:
    """Return the first position with this difference."""
    r, c = carray(pointer(r_at), ROW, np.uint64), carray(pointer(c_at), ROW, np.uint64)
    for i in range(n):
        if _integer_gap(r[i], c[i], codes[0] == _I64, codes[1] == _I64) == top:
            return i
    return 0
