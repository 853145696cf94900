"""The summary of a tensor in host memory, in one pass of compiled code on several cores.

Threads take chunks of fixed size from a shared counter. The chunks' results are joined in order, so the summary is the
same bit for bit for any number of threads. The calling thread works as well and never waits for a helper that has not
begun. Helpers stay idle between calls; `release` ends them, and so does the interpreter's exit. Several threads may
call at once, and a forked child may call, too.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from tensortap.core import dtypes, statistics
from tensortap.core.placement import Placement
from tensortap.core.records import Summary
from tensortap.errors import UsageError
from tensortap.kernels.compiling import announced, load
from tensortap.kernels.sharing import MOST_THREADS, Helpers
from tensortap.kernels.summary import reference, rows
from tensortap.kernels.summary.parts import Description, placed
from tensortap.kernels.team import Team

__all__ = ["CONSTANTS_AT", "LAYOUTS", "NUMBERS", "borrow", "chunks_of", "read_chunks", "release", "summarize"]

_log = logging.getLogger("tensortap")
_CHUNK = rows.CHUNK_ROWS * reference.ROW
_FIELDS = struct.Struct("=11dQ")

Array = npt.NDArray[Any]


class _Layout(NamedTuple):
    """The form in which the kernel reads elements of one dtype."""

    like: Any
    """An array of the dtype that rows are converted to: float32 if it holds every element exactly, else float64."""
    itemsize: int
    code: int
    table: int
    """Address of the table of 256 values, for 8-bit dtypes."""
    components: int
    """Components of an element: 2 if it is complex."""


class _SummaryScratch(threading.local):
    """Scratch memory of a thread, allocated once."""

    def __init__(self) -> None:
        self._memory = np.empty(rows.SCRATCH + 64, np.uint8)
        self.address = (_address(self._memory) + 63) // 64 * 64
        self.record = np.empty(rows.RECORD)
        self.record_address = _address(self.record)
        self.counter = np.zeros(1, np.int64)
        self.counter_address = _address(self.counter)


def summarize(array: Array, threads: int | None = None, placement: Placement | None = None) -> Summary:
    """Return the summary of `array` as `reference` defines it. `threads`: None means one for each core, at most 8.

    >>> summarize(np.array([3.0, -4.0], np.float32)).l2
    5.0
    """
    described: Description | None = None
    if placement is not None:
        array, part = placed(array, placement, CONSTANTS_AT)
        described = part.describe()
    layout = LAYOUTS.get(array.dtype)
    if layout is None or not array.flags.c_contiguous:
        array = reference.components(array)
        layout = LAYOUTS[array.dtype]
    elements = array.size * layout.components
    if not elements:
        return reference.summarize(array)
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be 1 or more, not {threads}")
    chunks = chunks_of(elements)
    records = np.empty(chunks * rows.RECORD) if chunks > 1 else _scratch.record
    records_at = _address(records) if chunks > 1 else _scratch.record_address
    placed_at = described.address if described is not None else 0
    keep = array, records, described
    read_chunks(_address(array), elements, layout[:4], records_at, keep, threads=threads, placed_at=placed_at)
    sketch = np.empty(reference.BUCKETS, np.float32)
    rows.finish(records_at, chunks, sketch)
    return _summary(elements, records, sketch, reference.added_values(array) if statistics.added() else {})


def chunks_of(elements: int) -> int:
    """Return the number of records that `read_chunks` writes."""
    return (elements + _CHUNK - 1) // _CHUNK


def read_chunks(
    source: int,
    elements: int,
    layout: tuple[Any, int, int, int],
    records_at: int,
    keep: Any,
    threads: int | None = None,
    placed_at: int = 0,
) -> None:
    """Read an array and write one record for each of its chunks, on as many threads as `summarize` does.

    `layout` has the first four fields of a `_Layout`. `keep` is what owns the memory: a helper may begin when the
    caller is gone, and look for a chunk.
    """
    like, itemsize, code, table = layout
    if like.itemsize not in _ready:
        _compile(like)
    chunks = chunks_of(elements)
    helpers = min(threads or MOST_THREADS, chunks) - 1
    if helpers > 0:
        counter = np.zeros(1, np.int64)
        counter_at = _address(counter)
    else:
        counter, counter_at = _scratch.counter, _scratch.counter_address
        counter[0] = 0
    work = source, elements, itemsize, code, table, counter_at, records_at, CONSTANTS_AT, placed_at
    if helpers > 0 and threads is None and _team is not None and _team.is_usable():
        _team.run(like, work, chunks)
    elif helpers > 0:
        _helpers.share(partial(_take_chunks, like, work, (keep, counter)), helpers)
    else:
        _take_chunks(like, work)


def borrow(library: str, threads: int) -> None:
    """Run summaries of the calling thread on the OpenMP threads of a framework; see `team`."""
    global _team
    try:
        _team = Team(library, min(threads, MOST_THREADS)) if threads > 1 else None
    except (OSError, AttributeError) as error:
        _log.debug("cannot borrow the threads of %s: %s", library, error)
        _team = None


def release() -> None:
    """End the helper threads. The next large array starts new ones."""
    _helpers.release()


def _take_chunks(like: Array, work: tuple[int, ...], keep: Any = None) -> None:
    """Work on chunks until none is left."""
    source, elements, itemsize, code, table, counter, records, constants, placed = work
    scratch = _scratch.address
    rows.run(source, elements, itemsize, code, table, like, counter, records, scratch, constants, placed)


def _summary(
    elements: int, records: npt.NDArray[np.float64], sketch: npt.NDArray[np.float32], more: dict[str, Any]
) -> Summary:
    n, nan, posinf, neginf, zeros, edge, low, high, mean, m2, l1, digest = _FIELDS.unpack_from(records.data)
    if not n and not edge:
        low = high = math.nan
    if not n:
        mean = std = math.nan
    elif low == high and not edge:
        mean, m2, std = low, 0.0, 0.0
    else:
        std = math.sqrt(m2 / n)
    l2 = math.sqrt(m2 + n * (mean * mean)) if n else 0.0
    counts = elements, int(nan), int(posinf), int(neginf), int(zeros), int(edge)
    return Summary(*counts, low, high, mean, std, l1, l2, digest, sketch, more=more)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _compile(like: Array) -> None:
    with announced(rows.run, f"CPU kernel for {8 * like.itemsize}-bit numbers"):
        at = types.int64
        load(rows.run, (at,) * 5 + (types.float32[::1] if like is _NARROW else types.float64[::1],) + (at,) * 5)
        load(rows.finish, (at, at, types.float32[::1]))
    _ready.add(like.itemsize)


def _layout(name: str) -> _Layout:
    dtype = dtypes.numpy_dtype(name)
    components = 2 if dtype.kind == "c" else 1
    itemsize = dtype.itemsize // components
    table = 0
    if itemsize == 1:
        code = "table"
        _TABLES[name] = np.arange(256, dtype=np.uint8).view(np.uint8 if name == "bool" else dtype).astype(np.float32)
        table = _address(_TABLES[name])
    else:
        code = {"bfloat16": "bf16", "float16": "f16"}.get(name, "direct")
        if dtype.kind in "iu":
            code = f"{dtype.kind}{8 * itemsize}"
    wide = itemsize == 8 or code in ("i32", "u32")
    return _Layout(_WIDE if wide else _NARROW, itemsize, rows.CODES[code], table, components)


def _constants() -> npt.NDArray[np.uint8]:
    """Return the constants of the definition in the order in which `rows` reads them."""
    seeds = np.array([reference.SIGN_SEED, reference.ROW_SEED], np.uint32)
    golden = np.array([reference.GOLDEN], np.uint64)
    head = np.concatenate([part.view(np.uint8) for part in (seeds, golden)])
    parts = [np.pad(head, (0, rows.WEIGHTS - head.size))]
    for itemsize in (1, 2, 4, 8):
        order = np.arange(128 // itemsize)
        weights = reference.digest_weights().reshape(order.size, -1)
        parts += [weights[order ^ moved].reshape(-1).view(np.uint8) for moved in order]
    return np.concatenate(parts)


NUMBERS = _NARROW, _WIDE = np.empty(0, np.float32), np.empty(0, np.float64)
_TABLES: dict[str, npt.NDArray[np.float32]] = {}
LAYOUTS = {dtypes.numpy_dtype(name): _layout(name) for name in dtypes.NAMES}
_CONSTANTS = _constants()
CONSTANTS_AT = _address(_CONSTANTS)
_scratch = _SummaryScratch()
_ready: set[int] = set()
_helpers = Helpers("tensortap-summary")
_team: Team | None = None
