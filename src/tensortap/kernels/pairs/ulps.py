"""Compiled loops that count the representable numbers between elements of two rows; `rows` calls them.

Floats of one sign have the order of their bits, so the steps between two floats of one type are a difference of
integers. Below zero the order is reversed, and -0 counts as 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from tensortap.kernels.jit import compiled
from tensortap.kernels.summary.elements import ROW
from tensortap.kernels.vectors import greater, pointer

__all__ = ["BITS", "INTEGERS", "ROUNDED", "WIDE_BITS", "steps_apart"]

INTEGERS, BITS, WIDE_BITS, ROUNDED = range(4)
"""Ways to count units in the last place: the difference itself; the bits of both, of one float type, as integers; their
bits after conversion to float64; or the rank of both among the numbers of the coarser type."""


# One loop for each width: LLVM does not vectorise a generic one.


@compiled()
def _steps8(r_at: int, c_at: int, n: int) -> Any:
    r, c = carray(pointer(r_at), ROW, np.int8), carray(pointer(c_at), ROW, np.int8)
    most = np.int16(0)
    for i in range(n):
        x, y = np.int16(r[i] & np.int8(0x7F)), np.int16(c[i] & np.int8(0x7F))
        x = np.int16(-x) if r[i] < 0 else x
        y = np.int16(-y) if c[i] < 0 else y
        steps = np.int16(x - y) if x > y else np.int16(y - x)
        most = steps if steps > most else most
    return np.float64(most)


@compiled()
def _steps16(r_at: int, c_at: int, n: int) -> Any:
    r, c = carray(pointer(r_at), ROW, np.int16), carray(pointer(c_at), ROW, np.int16)
    most = np.int32(0)
    for i in range(n):
        x, y = np.int32(r[i] & np.int16(0x7FFF)), np.int32(c[i] & np.int16(0x7FFF))
        x = np.int32(-x) if r[i] < 0 else x
        y = np.int32(-y) if c[i] < 0 else y
        steps = np.int32(x - y) if x > y else np.int32(y - x)
        most = steps if steps > most else most
    return np.float64(most)


@compiled()
def _steps32(r_at: int, c_at: int, n: int) -> Any:
    r, c = carray(pointer(r_at), ROW, np.int32), carray(pointer(c_at), ROW, np.int32)
    most = np.uint32(0)
    for i in range(n):
        x, y = np.int32(r[i] & np.int32(0x7FFFFFFF)), np.int32(c[i] & np.int32(0x7FFFFFFF))
        x = np.int32(-x) if r[i] < 0 else x
        y = np.int32(-y) if c[i] < 0 else y
        steps = np.uint32(np.uint32(x) - np.uint32(y)) if x > y else np.uint32(np.uint32(y) - np.uint32(x))
        most = steps if steps > most else most
    return np.float64(most)


@compiled()
def _steps64(r_at: int, c_at: int, n: int) -> Any:
    r, c = carray(pointer(r_at), ROW, np.int64), carray(pointer(c_at), ROW, np.int64)
    most = np.uint64(0)
    for i in range(n):
        x, y = r[i] & np.int64(0x7FFFFFFFFFFFFFFF), c[i] & np.int64(0x7FFFFFFFFFFFFFFF)
        x = -x if r[i] < 0 else x
        y = -y if c[i] < 0 else y
        steps = np.uint64(x) - np.uint64(y) if x > y else np.uint64(y) - np.uint64(x)
        most = steps if steps > most else most
    return np.float64(most)


@compiled()
def _ordinal(x: float, digits: int, lowest: int) -> Any:
    """Return the rank of x, rounded to a float type, among its numbers: 0 for zero. Exponents have no upper limit."""
    bits = np.float64(x).view(np.int64) & np.int64(0x7FFFFFFFFFFFFFFF)
    exponent = (bits >> np.int64(52)) - np.int64(1023)
    exponent = exponent if exponent > lowest else np.int64(lowest)
    scale = np.int64((digits - exponent + np.int64(1023)) << np.int64(52)).view(np.float64)
    number = np.rint(np.int64(bits).view(np.float64) * scale) + np.float64((exponent - lowest) << np.int64(digits))
    return -number if x < 0 else number


@compiled()
def _rounded_steps(r: Any, c: Any, n: int, digits: int, lowest: int) -> Any:
    most = 0.0
    for i in range(n):
        x = _ordinal(np.float64(r[i]), digits, lowest)
        y = _ordinal(np.float64(c[i]), digits, lowest)
        most = greater(most, abs(x - y))
    return most


@compiled()
def steps_apart(like: Any, unit: Any, itemsize: int, raw: Any, rows: Any, cleaned: bool, n: int) -> Any:
    """Return the most steps between two rows of `n` elements, given as in memory and as numbers of `like`'s dtype."""
    mode, digits, lowest = unit
    if mode == WIDE_BITS or (mode == BITS and cleaned and itemsize == like.itemsize):
        return _steps32(rows[0], rows[1], n) if like.itemsize == 4 else _steps64(rows[0], rows[1], n)
    if mode == BITS and cleaned:
        mode = ROUNDED
    if mode == ROUNDED:
        r, c = carray(pointer(rows[0]), ROW, like.dtype), carray(pointer(rows[1]), ROW, like.dtype)
        return _rounded_steps(r, c, n, digits, lowest)
    if itemsize == 1:
        return _steps8(raw[0], raw[1], n)
    if itemsize == 2:
        return _steps16(raw[0], raw[1], n)
    if itemsize == 4:
        return _steps32(raw[0], raw[1], n)
    return _steps64(raw[0], raw[1], n)
