"""Element types that every reader knows: bfloat16 and fp8 are stored as float32, which holds them exactly.

Bits are preserved, not only values: a NaN keeps its payload, so that digests stay valid.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes

__all__ = ["narrow", "recorded", "widen", "write_npy"]

Array = npt.NDArray[Any]


def widen(array: Array) -> Array:
    """Return the array itself, or as float32 if NumPy alone does not have its type.

    >>> widen(np.ones(2, dtypes.numpy_dtype("bfloat16"))).dtype.name
    'float32'
    """
    name = dtypes.name_of(array.dtype)
    if name == "bfloat16":
        bits: Array = np.ascontiguousarray(array).view(np.uint16).astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32).reshape(array.shape)
    if name.startswith("float8"):
        return _values(name)[np.ascontiguousarray(array).view(np.uint8)].reshape(array.shape)
    return array


def narrow(array: Array, name: str) -> Array:
    """Return the argument of `widen`, bit for bit; `name` is its dtype."""
    dtype = dtypes.numpy_dtype(name)
    if name == "bfloat16" and array.dtype == np.float32:
        high: Array = np.ascontiguousarray(array).view(np.uint32) >> np.uint32(16)
        return high.astype(np.uint16).view(dtype).reshape(array.shape)
    if name.startswith("float8") and array.dtype == np.float32:
        wide = np.ascontiguousarray(array)
        narrowed = wide.astype(dtype).view(np.uint8)
        hidden = (wide.view(np.uint32) & np.uint32(0xFF)).astype(np.uint8)
        has_code = np.isnan(wide) & np.isnan(hidden.view(dtype))  # not if another program widened it
        return np.where(has_code, hidden, narrowed).view(dtype).reshape(array.shape)
    return array.astype(dtype, copy=False)


def recorded(array: Array, name: str) -> Array:
    """Return the array in the dtype that was recorded. Raise ValueError if it cannot have had that dtype.

    bfloat16 and fp8 may be stored as float32 (see `widen`), or as their bits: an unsigned integer or a void type of the
    same size. Any other dtype is stored as it is.

    >>> recorded(np.array([0x3F80], np.uint16), "bfloat16").astype(float)
    array([1.])
    """
    dtype = dtypes.numpy_dtype(name)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype == dtype:
        return array
    if dtype.isbuiltin == 1:  # a type that every reader knows
        raise ValueError(f"it holds {array.dtype}, although {name} was recorded")
    if array.dtype.itemsize == dtype.itemsize and array.dtype.kind in "uV":
        bits: Array = np.ascontiguousarray(array)
        return bits.view(dtype).reshape(array.shape)
    narrowed = narrow(array, name) if array.dtype == np.float32 else array
    if narrowed is array or not np.array_equal(widen(narrowed), array, equal_nan=True):
        raise ValueError(f"it holds {array.dtype} values that {name} cannot represent, although {name} was recorded")
    return narrowed


def write_npy(file: BinaryIO, array: Array) -> None:
    """Write an array as .npy, bfloat16 and float8 as float32.

    `np.save` reports a full disk without the reason: "2048 requested and 2016 written".
    """
    plain = np.asarray(widen(array), order="C")
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(plain))
    file.write(plain.reshape(-1).view(np.uint8).data)


def _values(name: str) -> npt.NDArray[np.float32]:
    """Return the float32 of each of the 256 codes. A NaN has its code in its lowest bits."""
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(dtypes.numpy_dtype(name)).astype(np.float32)
    quiet = np.uint32(0x7FC00000) | ((codes.astype(np.uint32) >> 7) << np.uint32(31)) | codes
    return np.where(np.isnan(values), quiet.view(np.float32), values)
