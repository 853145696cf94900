"""Rows of 1024 elements as numbers: read from memory, and converted to float32 if that is exact, else to float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import overload

from tensortap.kernels.jit import compiled
from tensortap.kernels.vectors import pointer

__all__ = ["BF16", "CODES", "DIRECT", "F16", "ROW", "convert", "edge_of", "load"]

ROW = 1024
CODES = {
    name: code for code, name in enumerate(("direct", "table", "bf16", "f16", "i16", "u16", "i32", "u32", "i64", "u64"))
}
"""Conversions of a row's bits to numbers. All 8-bit types use a table of 256 float32 values."""
DIRECT, _TABLE, BF16, F16, _I16, _U16, _I32, _U32, _I64, _U64 = CODES.values()


@compiled()
def load(source: int, used: int, whole: int, raw: int) -> None:
    """Copy a row that is not aligned or not whole, and pad it with zeros."""
    bytes_in, bytes_out = carray(pointer(source), used, np.uint8), carray(pointer(raw), whole, np.uint8)
    for i in range(used):  # slices would take seconds to compile
        bytes_out[i] = bytes_in[i]
    for i in range(used, whole):
        bytes_out[i] = 0


def _narrow_values(code: int, row: int, table: int, out: Any) -> None:
    """Convert the elements of a row to float32."""
    halves = carray(pointer(row), ROW, np.uint16)
    if code == _TABLE:
        small, numbers = carray(pointer(row), ROW, np.uint8), carray(pointer(table), 256, np.float32)
        for i in range(ROW):
            out[i] = numbers[small[i]]
    elif code == BF16:
        for i in range(ROW):
            out[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16)).view(np.float32)
    elif code == F16:
        for i in range(ROW):
            half = np.uint32(halves[i])
            # The exponent comes out 112 too low; a multiplication corrects it, for denormals, too. Inf and NaN have the
            # highest exponent in either type.
            magnitude = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
            bits = np.float32(magnitude).view(np.uint32)
            if (half & np.uint32(0x7C00)) == np.uint32(0x7C00):
                bits = np.uint32(bits | np.uint32(0x7F800000))
            out[i] = np.uint32(bits | ((half & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)
    elif code == _I16:
        signed = carray(pointer(row), ROW, np.int16)
        for i in range(ROW):
            out[i] = np.float32(signed[i])
    else:
        for i in range(ROW):
            out[i] = np.float32(halves[i])


def _wide_values(code: int, row: int, table: int, out: Any) -> None:
    """Convert the elements of a row to float64."""
    if code == _I32:
        i32 = carray(pointer(row), ROW, np.int32)
        for i in range(ROW):
            out[i] = np.float64(i32[i])
    elif code == _U32:
        u32 = carray(pointer(row), ROW, np.uint32)
        for i in range(ROW):
            out[i] = np.float64(u32[i])
    elif code == _I64:
        i64 = carray(pointer(row), ROW, np.int64)
        for i in range(ROW):
            out[i] = np.float64(i64[i])
    else:
        u64 = carray(pointer(row), ROW, np.uint64)
        for i in range(ROW):
            out[i] = np.float64(u64[i])


def convert(code: int, row: int, table: int, out: Any) -> None:
    """Convert the elements of a row to the dtype of `out`."""


@overload(convert, strict=False)  # type: ignore[untyped-decorator]  # strict compares annotations too
def _choose(code: Any, row: Any, table: Any, out: Any) -> Callable[..., None]:
    return _narrow_values if out.dtype == types.float32 else _wide_values


@compiled()
def edge_of(itemsize: int, code: int) -> float:
    """Return `dtypes.edge_of` the elements."""
    if code == F16:
        return 63 / 32 * 2.0**15
    if code == BF16 or (code == DIRECT and itemsize == 4):
        return 63 / 32 * 2.0**127
    return 63 / 32 * 2.0**1023 if code == DIRECT else np.inf
