"""Summaries of many arrays: small ones are copied when they come, large ones are read, and all are completed later.

For an array of a few kilobytes, calling and returning takes longer than the summary itself. A copy takes half a
microsecond, and another thread may summarise it while the program continues and changes the array. The record of a
large array is kept until then. The results are those of `cpu.summarize`, bit for bit.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from tensortap.kernels.compiling import announced, load
from tensortap.kernels.summary import cpu, items, reference, rows

__all__ = ["MOST_COPIED", "MOST_READ", "MOST_ROWS", "READ_LIMITS", "SummaryBatch", "layout_address"]

MOST_COPIED = 32 << 10
"""Bytes of the largest array that is copied."""
MOST_READ = 64 << 20
"""Elements of the largest array that is read; its records take half of the room of a batch."""
MOST_ROWS = 512
"""Arrays of a batch."""
_ROOM = 1 << 20
_ALIGNED = 64
_DIGEST = 11

Array = npt.NDArray[Any]


class SummaryBatch:
    """Up to some hundred arrays. One thread adds them; after the last one, any thread may take the results."""

    def __init__(self) -> None:
        _prepare()
        self._items = np.empty((MOST_ROWS, items.ITEM), np.int64)
        self._items_at: int = self._items.ctypes.data
        self._copies = np.empty(_ROOM + _ALIGNED, np.uint8)
        self._next: int = _aligned(self._copies.ctypes.data)
        self._end = self._next + _ROOM
        self._size = 0
        self._columns: dict[str, Array] | None = None
        self._completing = threading.Lock()

    def __len__(self) -> int:
        return self._size

    def add(self, address: int, elements: int, nbytes: int, layout: int) -> int | None:
        """Copy or read an array that is not empty, and return its row; None if there is no room.

        It has at most MOST_READ elements; `layout` is from `layout_address`.
        """
        row, at = self._size, self._next
        chunks = cpu.chunks_of(elements) if nbytes > MOST_COPIED else 0
        room = items.PROBE_BYTES + chunks * _RECORD_BYTES if chunks else nbytes
        if row == MOST_ROWS or at + room > self._end:
            return None
        self._next = at + room + -room % _ALIGNED
        self._size = row + 1
        item = self._items_at + row * _ITEM_BYTES
        if chunks:
            items.read_in(address, elements, layout, item, at, chunks)
            self.read(row, address)
        else:
            items.copy_in(address, elements, layout, item, at)
        return row

    def read(self, row: int, address: int) -> None:
        """Read the chunks of the array that this row describes."""
        at, elements, _, itemsize, code, table, wide, _ = self._items[row].tolist()
        layout = cpu.NUMBERS[wide], itemsize, code, table
        cpu.read_chunks(address, elements, layout, at + items.PROBE_BYTES, self)
        items.complete(self._items_at + row * _ITEM_BYTES)

    def digest(self, row: int) -> int:
        """Return the digest of an array that was read."""
        return int(items.digest_of(self._items_at + row * _ITEM_BYTES))

    def is_copy(self, row: int, address: int) -> bool:
        """Return whether the bytes at an address are those of the array in this row; of one that was read, a few."""
        return bool(items.is_copy(self._items_at + row * _ITEM_BYTES, address))

    def columns(self) -> dict[str, Array]:
        """Return the summaries of all rows, by the names of the statistics."""
        with self._completing:
            if self._columns is None:
                results = np.empty((self._size, rows.FIELDS))
                sketches = np.empty((self._size, reference.BUCKETS), np.float32)
                at = results.ctypes.data, sketches.ctypes.data
                items.run_many(self._items_at, self._size, *at, _scratch.address, cpu.CONSTANTS_AT)
                self._columns = _columns(self._items[: self._size, 1], results, sketches)
            return self._columns


def _columns(elements: Array, results: Array, sketches: Array) -> dict[str, Array]:
    """Return the statistics as `cpu.summarize` computes them from a record, for many records."""
    n, low, high, mean, m2, l1 = (results[:, place].copy() for place in (0, 6, 7, 8, 9, 10))
    names = ("nan", "posinf", "neginf", "zeros", "edge")
    counts = {name: results[:, 1 + place].astype(np.int64) for place, name in enumerate(names)}
    none, edge = n == 0, counts["edge"] > 0
    constant = ~none & (low == high) & ~edge
    mean[constant], m2[constant] = low[constant], 0.0
    with np.errstate(all="ignore"):
        std = np.sqrt(m2 / n)
        l2 = np.sqrt(m2 + n * (mean * mean))
    low[none & ~edge] = high[none & ~edge] = np.nan
    mean[none] = std[none] = np.nan
    std[constant], l2[none] = 0.0, 0.0
    moments = {"min": low, "max": high, "mean": mean, "std": std, "l1": l1, "l2": l2}
    digest = np.ascontiguousarray(results[:, _DIGEST]).view(np.uint64)
    return {"elements": elements.copy(), **counts, **moments, "digest": digest, "sketch": sketches}


def layout_address(dtype: np.dtype[Any]) -> int | None:
    """Return the address of a dtype's layout for `SummaryBatch.add`; None for complex and unknown dtypes."""
    if (known := _addresses.get(dtype)) is not None:
        return known
    layout = cpu.LAYOUTS.get(dtype)
    if layout is None or layout.components != 1:
        return None
    fields = np.array([layout.itemsize, layout.code, layout.table, layout.like.itemsize == 8], np.int64)
    _kept.append(fields)
    _addresses[dtype] = int(fields.ctypes.data)
    return _addresses[dtype]


def _aligned(address: int) -> int:
    return (address + _ALIGNED - 1) // _ALIGNED * _ALIGNED


def _prepare() -> None:
    global _ready
    if _ready:
        return
    with announced(items.run_many, "CPU kernel for small tensors"):
        at = types.int64
        load(items.copy_in, (at,) * 5)
        load(items.read_in, (at,) * 6)
        load(items.complete, (at,))
        load(items.digest_of, (at,))
        load(items.is_copy, (at, at))
        load(items.run_many, (at,) * 6)
    _ready = True


class _BatchScratch(threading.local):
    """Scratch memory of a thread, allocated once."""

    def __init__(self) -> None:
        self._memory = np.empty(8 * rows.RECORD + rows.SCRATCH + _ALIGNED, np.uint8)
        self.address = _aligned(self._memory.ctypes.data)


_ITEM_BYTES, _RECORD_BYTES = 8 * items.ITEM, 8 * rows.RECORD
READ_LIMITS = MOST_COPIED, rows.CHUNK_ROWS * reference.ROW, _RECORD_BYTES
"""Bytes from which an array is read instead of copied, the elements of a chunk and the bytes of its record."""
_addresses: dict[np.dtype[Any], int] = {}
_kept: list[Array] = []
_scratch = _BatchScratch()
_ready = False
