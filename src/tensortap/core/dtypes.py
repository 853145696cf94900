"""Element types by the names that torch and paddle use ("bfloat16"), with their NumPy dtypes and safetensors tags.

ml_dtypes brings NumPy the dtypes that it lacks.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = [
    "NAMES",
    "edge_of",
    "from_tag",
    "name_of",
    "numpy_dtype",
    "range_of",
    "safetensors_tag",
    "with_range_ends_of",
]

_TAGS: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    # safetensors has a tag for complex64 only; complex128 is kept as pairs of F64, its shape one longer on disk.
    "complex64": "C64",
    "complex128": "F64",
}
_NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in _TAGS}
_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in _NUMPY.items()}

NAMES: tuple[str, ...] = tuple(_TAGS)
"""All dtypes that can be summarised and stored."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a name. Raise KeyError if the name is unknown.

    >>> numpy_dtype("bfloat16").itemsize
    2
    """
    return _NUMPY[name]


def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a NumPy dtype of any byte order. Raise KeyError if the dtype is not supported."""
    return _NAMES[dtype.newbyteorder("=")]


def range_of(name: str) -> tuple[float, float] | None:
    """Return the lowest and the highest finite number of a float dtype of 16 or more bits.

    Return None for integers, complex numbers and shorter dtypes, whose values reach the ends in normal use.

    >>> range_of("float16"), range_of("int64")
    ((-65504.0, 65504.0), None)
    """
    return _RANGES.get(name)


def edge_of(name: str) -> float:
    """Return the magnitude from which on a finite number is at the edge of a dtype's range; infinite if none is.

    It is 63/64 of the power of two above the greatest number, which every dtype holds exactly. Other dtypes' lowest
    numbers are beyond it after a cast: bfloat16's in float32.

    >>> edge_of("float16"), edge_of("int64")
    (64512.0, inf)
    """
    return _EDGES.get(name, math.inf)


def with_range_ends_of(name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return values to be cast to dtype `name`, with the ends of their own range moved to the ends of its range.

    Masks hold the lowest number of their dtype; a plain cast would make it infinite, or an ordinary number.

    >>> with_range_ends_of("float16", np.array([1.0, np.finfo(np.float32).min], np.float32)).tolist()
    [1.0, -65504.0]
    """
    own, other = range_of(name_of(values.dtype)), range_of(name)
    if own is None or other is None or own == other:
        return values
    at_ends = [values == values.dtype.type(end) for end in own]
    if not any(mask.any() for mask in at_ends):
        return values
    wide = values.astype(np.float64)
    for mask, end in zip(at_ends, other, strict=True):
        wide[mask] = end
    return wide


def safetensors_tag(name: str) -> str:
    """Return the tag of a dtype in the header of a safetensors file."""
    return _TAGS[name]


def from_tag(tag: str) -> str:
    """Return the dtype name of a safetensors tag. Raise KeyError if the tag is unknown."""
    return _BY_TAG[tag]


_BY_TAG: dict[str, str] = {tag: name for name, tag in _TAGS.items() if name != "complex128"}

_RANGES: dict[str, tuple[float, float]] = {
    name: (float(ml_dtypes.finfo(_NUMPY[name]).min), float(ml_dtypes.finfo(_NUMPY[name]).max))
    for name in ("float64", "float32", "float16", "bfloat16")
}
_EDGES: dict[str, float] = {
    name: 63 / 32 * 2.0 ** float(ml_dtypes.finfo(_NUMPY[name]).maxexp - 1)
    for name in ("float64", "float32", "float16", "bfloat16")
}
_EDGES |= {"complex64": _EDGES["float32"], "complex128": _EDGES["float64"]}
