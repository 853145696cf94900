"""The compiled functions of a batch: describe, copy and recognise arrays, and complete the summaries of all of them.

As in `rows`, memory is passed as addresses, and numba's cache watches this file only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from tensortap.kernels.jit import compiled, entry, short_entry
from tensortap.kernels.summary.moments import DIGEST
from tensortap.kernels.summary.probe import PROBED, SCATTER
from tensortap.kernels.summary.rows import FIELDS, RECORD, add_chunk, join_chunks
from tensortap.kernels.vectors import copy_bytes, pointer

__all__ = ["ITEM", "PROBE_BYTES", "complete", "copy_in", "digest_of", "is_copy", "read_in", "run_many"]

ITEM = 8
"""Fields of 8 bytes that describe an array of a batch: the address of its copy; its elements and bytes; the size,
conversion and table of its elements, and whether they are converted to float64; and its chunks, if it was read instead
of copied. The address is then that of a few of its elements, and the records of its chunks follow after PROBE_BYTES."""
PROBE_BYTES = 8 * PROBED
"""Room for the elements that show whether an array has changed since it was read."""


@short_entry
def copy_in(source: int, elements: int, layout: int, item: int, room: int) -> None:
    """Copy an array into `room` and describe it in `item`. `layout` is the address of four fields of an item."""
    fields = carray(pointer(item), ITEM, np.int64)
    _describe(fields, elements, layout, room)
    copy_bytes(room, source, fields[2])


@short_entry
def read_in(source: int, elements: int, layout: int, item: int, room: int, chunks: int) -> None:
    """Describe an array in `item` whose chunks are about to be read, and copy the elements that show changes."""
    fields = carray(pointer(item), ITEM, np.int64)
    _describe(fields, elements, layout, room)
    fields[7] = chunks
    for part in range(PROBED):
        copy_bytes(room + part * fields[3], source + _probed(part, elements) * fields[3], fields[3])


@compiled(nogil=False)
def _describe(fields: Any, elements: int, layout: int, room: int) -> None:
    given = carray(pointer(layout), 4, np.int64)
    fields[0], fields[1], fields[2], fields[7] = room, elements, elements * given[0], 0
    for i in range(4):
        fields[3 + i] = given[i]


@compiled(nogil=False)
def _probed(part: int, elements: int) -> int:
    """Return the position of an element that `probe` samples."""
    step = elements // PROBED
    return part * step + part * SCATTER % step


@short_entry
def is_copy(item: int, source: int) -> bool:
    """Return whether the bytes at `source` are still those that were copied, or a few of those that were read."""
    fields = carray(pointer(item), ITEM, np.int64)
    if fields[7] == 0:
        return _same_bytes(fields[0], source, fields[2])
    size = fields[3]
    for part in range(PROBED):
        if not _same_bytes(fields[0] + part * size, source + _probed(part, fields[1]) * size, size):
            return False
    return True


@compiled(nogil=False)
def _same_bytes(one: int, other: int, size: int) -> bool:
    here, there = carray(pointer(one), size, np.uint8), carray(pointer(other), size, np.uint8)
    different = np.uint8(0)
    for i in range(size):
        different |= here[i] ^ there[i]
    return bool(different == 0)


@short_entry
def complete(item: int) -> None:
    """Join the chunks of an array, once all of them were read."""
    fields = carray(pointer(item), ITEM, np.int64)
    join_chunks(fields[0] + PROBE_BYTES, fields[7])


@short_entry
def digest_of(item: int) -> int:
    """Return the digest of an array that was read."""
    fields = carray(pointer(item), ITEM, np.int64)
    return carray(pointer(fields[0] + PROBE_BYTES), FIELDS, np.uint64)[DIGEST]  # type: ignore[no-any-return]


@entry
def run_many(items: int, count: int, results: int, sketches: int, scratch: int, constants: int) -> None:
    """Summarise the arrays of a batch: FIELDS numbers of each into `results`, 256 into `sketches`.

    Copies are of at most one chunk. The first RECORD numbers of scratch memory hold the record of one of them, the rest
    is for `add_chunk`.
    """
    for at in range(count):
        record = scratch
        item = carray(pointer(items + at * ITEM * 8), ITEM, np.int64)
        layout = (item[3], item[4], item[5])
        if item[7] != 0:
            record = item[0] + PROBE_BYTES
        elif item[6] != 0:
            wide = carray(pointer(record), 0, np.float64)
            add_chunk(item[0], item[1], 0, layout, wide, 0, record, scratch + RECORD * 8, constants)
        else:
            narrow = carray(pointer(record), 0, np.float32)
            add_chunk(item[0], item[1], 0, layout, narrow, 0, record, scratch + RECORD * 8, constants)
        numbers = carray(pointer(record), RECORD, np.float64)
        out = carray(pointer(results + at * FIELDS * 8), FIELDS, np.float64)
        sketch = carray(pointer(sketches + at * 1024), 256, np.float32)
        for i in range(FIELDS):
            out[i] = numbers[i]
        for i in range(256):
            sketch[i] = numbers[FIELDS + i]
