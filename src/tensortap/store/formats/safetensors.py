"""safetensors files, read without trusting their headers.

The format: 8 bytes with the length of the header, the header as JSON, then the tensors without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.errors import RunUnreadable, shorten
from tensortap.store.source import Bytes, as_array

__all__ = ["read_safetensors"]

Array = npt.NDArray[Any]
_LONGEST_HEADER = 100 << 20
_MOST_AXES = 64


class _HeaderEntry(NamedTuple):
    begin: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def read_safetensors(files: Bytes, name: str) -> dict[str, Callable[[], Array]]:
    """Return functions that map each tensor, by name. Raise RunUnreadable if the header does not fit the file."""
    path, size = files.address(name), files.size(name)
    start, header = _header(files, name, size)
    header.pop("__metadata__", None)
    entries = sorted(_entry(path, key, value) for key, value in header.items())
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise RunUnreadable(
                f"{path} is damaged: {shorten(entry.name)!r} begins at byte {entry.begin}, but the tensor before it "
                f"ends at {end}. Tensors neither overlap nor leave gaps."
            )
        end = entry.end
        if start + end > size:
            raise RunUnreadable(f"{path} is cut off: {shorten(entry.name)!r} ends beyond it.")
    by_name = {entry.name: entry for entry in entries}
    return {key: partial(_load, files, name, start, by_name[key]) for key in header}


def _load(files: Bytes, name: str, start: int, entry: _HeaderEntry) -> Array:
    view = files.view(name, start + entry.begin, entry.end - entry.begin)
    return as_array(view, entry.dtype, entry.shape)


def _header(files: Bytes, name: str, size: int) -> tuple[int, dict[str, Any]]:
    """Return the offset of the tensors, and the entries of the header."""
    path = files.address(name)
    length = int.from_bytes(files.read(name, 0, 8), "little") if size >= 8 else size
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise RunUnreadable(f"{path} is not a safetensors file, or only the beginning of one.")
    try:
        header = json.loads(bytes(files.read(name, 8, length)))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise RunUnreadable(f"{path} is not a safetensors file: its header is damaged.")
    return 8 + length, header


def _entry(path: str, name: str, value: Any) -> _HeaderEntry:
    """Return an entry of a header. Raise RunUnreadable if it is invalid."""
    try:
        dtype = dtypes.from_tag(value["dtype"])
    except (KeyError, TypeError) as error:
        raise RunUnreadable(f"{path}: the dtype of {shorten(name)!r} is not known: {shorten(str(error))}") from error
    try:
        shape, (begin, end) = tuple(value["shape"]), value["data_offsets"]
        whole = all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, begin, end))
        if not whole or len(shape) > _MOST_AXES or end - begin != prod(shape) * dtypes.numpy_dtype(dtype).itemsize:
            raise ValueError(f"{value['shape']} at {value['data_offsets']} cannot be")
        name.encode()
    except (KeyError, TypeError, ValueError) as error:
        raise RunUnreadable(f"{path} is damaged in the entry of {shorten(name)!r}: {shorten(str(error))}") from error
    return _HeaderEntry(begin, end, name, dtype, shape)
