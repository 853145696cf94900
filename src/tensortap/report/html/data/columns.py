"""Columns of a long table as blocks: typed, byte-shuffled, and rounded to the digits that are shown.

A hundred thousand rows must fit into a file that can be mailed. The random last bits of floats cost most, so long
tables drop them. Bytes of the same significance are stored together, which compresses better. A candidate's column
is stored as XOR with the reference's.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.report.html.data.blocks import DataBlock

__all__ = ["ALL_BITS", "PageColumn", "bits_for", "entries", "packed"]

ALL_BITS = 23
_LONG = 20_000
_ERROR_BITS, _VALUE_BITS = 7, 10  # good for 2 and 3 decimal digits
_INTEGERS = (np.uint8, np.uint16, np.uint32, np.int32)
_TYPES = {"uint8": "u8", "uint16": "u16", "uint32": "u32", "int32": "i32", "float32": "f32", "float64": "f64"}


@dataclass(frozen=True)
class PageColumn:
    """One column with its title and description."""

    name: str
    values: npt.NDArray[Any]
    title: str
    text: str = ""
    unit: str = ""
    words: str | None = None
    """The list of words that the values are codes of."""
    bits: int = ALL_BITS
    """Mantissa bits that are kept of a float."""
    like: str | None = None
    """A column with mostly equal values; the XOR with it is written."""
    rising: bool = False
    """Whether values mostly increase by one; differences are written."""


def bits_for(rows: int, error: bool = False) -> int:
    """Return the mantissa bits to keep in a table of `rows` rows."""
    if rows <= _LONG:
        return ALL_BITS
    return _ERROR_BITS if error else _VALUE_BITS


def entries(columns: Sequence[PageColumn]) -> list[dict[str, Any]]:
    """Return the descriptions that scripts need to read the blocks; see docs/report-data.md."""
    wide = _wide(columns)
    types = {column.name: _typed(column, wide).dtype for column in columns}
    return [
        {
            "name": column.name,
            "type": _TYPES[types[column.name].name],
            "shuffled": types[column.name].itemsize > 1,
            "delta": column.rising,
            "xor": column.like,
            "bits": column.bits,
            "words": column.words,
            "unit": column.unit,
            "title": column.title,
            "text": column.text,
        }
        for column in columns
    ]


def packed(columns: Sequence[PageColumn]) -> list[DataBlock]:
    by_name, wide = {column.name: column for column in columns}, _wide(columns)
    return [_block(column, None if column.like is None else by_name[column.like], wide) for column in columns]


def _block(column: PageColumn, like: PageColumn | None, wide: Set[str]) -> DataBlock:
    values = _typed(column, wide)
    word = np.dtype(f"<u{values.dtype.itemsize}")
    bits = values.view(word)
    if like is not None:
        bits = bits ^ _typed(like, wide).view(word)
    if column.rising:
        bits = np.diff(bits, prepend=word.type(0))
    return DataBlock.of(f"column-{column.name}", _shuffled(bits))


def _wide(columns: Sequence[PageColumn]) -> set[str]:
    """Return float columns with values outside the range of float32. Columns related by XOR share one type."""
    beyond = {column.like or column.name for column in columns if not _fits(column.values)}
    return {column.name for column in columns if (column.like or column.name) in beyond}


def _fits(values: npt.NDArray[Any]) -> bool:
    if values.dtype.kind in "iub":
        return True
    with np.errstate(over="ignore", under="ignore"):
        held = values.astype(np.float32)
    return bool(((np.isfinite(held) == np.isfinite(values)) & ((held == 0) == (values == 0))).all())


def _typed(column: PageColumn, wide: Set[str]) -> npt.NDArray[Any]:
    if column.values.dtype.kind in "iub":
        return _smallest(column.values)
    return _rounded(column.values, column.bits, "8" if column.name in wide else "4")


def _smallest(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return integers in the shortest type that holds them; beyond 32 bits as floats, exact up to 2^53."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    for kind in _INTEGERS:
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return np.asarray(values, np.dtype(kind).newbyteorder("<"))
    return np.asarray(values, "<f8")


def _rounded(values: npt.NDArray[Any], bits: int, size: str) -> npt.NDArray[Any]:
    """Round to a float of `size` bytes with `bits` mantissa bits. Finite values stay finite."""
    held = np.asarray(values, f"<f{size}")
    spare = np.finfo(held.dtype).nmant - bits
    if bits < ALL_BITS:
        word = held.view(f"<u{size}")
        half, kept = (word.dtype.type(number) for number in (1 << (spare - 1), 2 ** (8 * held.itemsize) - (1 << spare)))
        up = ((word + half) & kept).view(held.dtype)
        held = np.where(np.isfinite(held) & np.isfinite(up), up, held)
    return held


def _shuffled(values: npt.NDArray[Any]) -> bytes:
    """Return all first bytes, then all second bytes, and so on."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(len(values), values.itemsize).T).tobytes()
