"""The element types that all rooms know, by the names that torch and paddle users say.

A dtype is spoken of by its name ("bfloat16"). NumPy knows the unusual ones through ml_dtypes; a safetensors file
has a tag of its own for each.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["NAMES", "from_tag", "name_of", "numpy_dtype", "safetensors_tag"]

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
    """The NumPy dtype of that name; KeyError if tensortap does not know it.

    >>> numpy_dtype("bfloat16").itemsize
    2
    """
    return _NUMPY[name]


def name_of(dtype: np.dtype[Any]) -> str:
    """The name of a NumPy dtype, whatever its byte order; KeyError if tensortap does not know it."""
    return _NAMES[dtype.newbyteorder("=")]


def safetensors_tag(name: str) -> str:
    """The tag under which a safetensors header lists that dtype."""
    return _TAGS[name]


def from_tag(tag: str) -> str:
    """The name behind a safetensors tag; KeyError if tensortap does not know it."""
    return _BY_TAG[tag]


_BY_TAG: dict[str, str] = {tag: name for name, tag in _TAGS.items() if name != "complex128"}
