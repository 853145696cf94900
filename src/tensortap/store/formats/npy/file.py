"""One .npy file: its tensor, or the reason why it cannot be read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.records import Location
from tensortap.errors import RunUnreadable
from tensortap.store.formats.entries import LoadedTensor
from tensortap.store.formats.npy.header import LONGEST_HEADER, NpyHeader, array_from, read_header
from tensortap.store.source import Bytes, LocalFiles

__all__ = ["load_npy", "read_npy"]

Array = npt.NDArray[Any]


def load_npy(files: Bytes, name: str) -> LoadedTensor:
    """Map the array of a file, in the dtype and byte order that it has there."""
    header = _header(files, name)
    location = Location(name, header.offset, header.nbytes) if header.is_plain else None
    return LoadedTensor(array_from(files.view(name, header.offset, header.nbytes), header), location)


def read_npy(path: Path) -> Array:
    """Read the tensor of a file. Raise RunUnreadable, with the reason alone, if it holds none."""
    files, name = LocalFiles(), str(path)
    try:
        header = _header(files, name)
    except FileNotFoundError as error:
        raise RunUnreadable(str(error.strerror)) from error
    try:
        dtypes.name_of(header.dtype)
    except KeyError:
        known = ", ".join(dtypes.NAMES)
        raise RunUnreadable(f"elements of dtype {header.dtype} cannot be compared; known are {known}") from None
    return array_from(files.read(name, header.offset, header.nbytes), header)


def _header(files: Bytes, name: str) -> NpyHeader:
    size = files.size(name)
    return read_header(io.BytesIO(files.read(name, 0, min(size, LONGEST_HEADER))), size)
