"""The header of an .npy array, read without trusting it: no pickle, and no size that the file does not have."""

from __future__ import annotations

import warnings
from math import prod
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.errors import RunUnreadable

__all__ = ["LONGEST_HEADER", "NpyHeader", "array_from", "known_dtype", "read_header", "readable_dtype"]

LONGEST_HEADER = 1 << 14
"""Bytes that hold any header that NumPy reads."""
_ARCHIVE = b"PK\x03\x04"
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class NpyHeader(NamedTuple):
    """The description of an array in its .npy file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_columns: bool
    offset: int
    """Where the elements begin in the file."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether the file holds the elements as memory does."""
        return not self.by_columns and self.dtype.isnative


def read_header(stream: BinaryIO, size: int) -> NpyHeader:
    """Read the header of an array in a file of `size` bytes; raise RunUnreadable, with the reason alone, if invalid."""
    try:
        begin = stream.tell()
        if stream.read(len(_ARCHIVE)) == _ARCHIVE:
            raise ValueError("it is an archive of several arrays: rename it to .npz, or save each array separately")
        stream.seek(begin)
        version = np.lib.format.read_magic(stream)
        if version not in _READERS:
            raise ValueError(f"it is of .npy version {version[0]}.{version[1]}, which only named fields need")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers that Python 2 wrote
            shape, by_columns, dtype = _READERS[version](stream)
        header = NpyHeader(dtype, tuple(shape), by_columns, stream.tell())
    except Exception as error:  # NumPy parses it as Python, and raises anything from SyntaxError to TokenError
        raise RunUnreadable(" ".join(str(error).split())[:200] or type(error).__name__) from error
    if dtype.hasobject:
        raise RunUnreadable(
            "it holds Python objects, which only pickle can read, and a pickle can run any code; save each array by "
            "itself, as numbers"
        )
    if any(length < 0 for length in header.shape) or header.offset + header.nbytes > size:
        raise RunUnreadable(
            f"it is cut off or damaged: its header says {dtype} {list(header.shape)[:8]}, "
            f"which does not fit into the {max(0, size - header.offset)} bytes behind it"
        )
    return header


def array_from(data: memoryview, header: NpyHeader) -> npt.NDArray[Any]:
    """Return the array over the bytes behind its header, without a copy if its elements are aligned."""
    if not header.nbytes:
        return np.empty(header.shape, header.dtype)
    flat = np.frombuffer(data[: header.nbytes], np.uint8).view(header.dtype)
    try:
        array = flat.reshape(header.shape, order="F" if header.by_columns else "C")
    except ValueError as error:  # more dimensions than NumPy has
        raise RunUnreadable(str(error)) from error
    return array if array.flags.aligned else array.copy()


def known_dtype(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array in native byte order. Raise RunUnreadable if its dtype is unknown."""
    dtype = readable_dtype(array.dtype)
    return array.view(dtype) if array.dtype.kind == "V" else array.astype(dtype, copy=False)


def readable_dtype(stored: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype as which elements are read. Raise RunUnreadable if there is none."""
    if stored.kind == "V" and stored.itemsize == 2 and stored.names is None:
        return dtypes.numpy_dtype("bfloat16")  # numpy.save writes it so
    try:
        return dtypes.numpy_dtype(dtypes.name_of(stored))
    except KeyError:
        raise RunUnreadable(f"elements of dtype {stored} cannot be compared") from None
