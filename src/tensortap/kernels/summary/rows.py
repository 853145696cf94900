"""The compiled loops of the CPU kernel: one pass over memory, row after row of 1024 elements.

A row is read into the first-level cache once, as float32 if that is exact, else as float64. Three short loops then pass
over it: digest, moments, sketch. LLVM vectorises each of them; one long loop would run at a quarter of the speed.

Memory is passed as addresses: a call costs a microsecond less, and elements of all types share one compiled function.
All compiled functions are in this file, because numba's cache watches no other file for changes: after a change in
vectors.py, touch this file. Constants of the definition are passed as tables for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import carray, types
from numba.extending import overload

from tensortap.kernels.vectors import add_signed, copy_bytes, greater, lesser, pointer, take

__all__ = [
    "CHUNK_ROWS",
    "CODES",
    "FIELDS",
    "ITEM",
    "RECORD",
    "SCRATCH",
    "WEIGHTS",
    "WORK",
    "copy_in",
    "finish",
    "is_copy",
    "run",
    "run_many",
    "team_entry",
]

ROW = 1024
CHUNK_ROWS = 256
"""Rows in a chunk, the unit of work of a thread. Fixed, so that the number of threads does not change the result."""
FIELDS = 16
RECORD = FIELDS + 256
"""A chunk's result in 8-byte fields: the numbers below, then the sketch in float64."""
_N, _NAN, _POSINF, _NEGINF, _ZEROS, _EDGE, _MIN, _MAX, _MEAN, _M2, _L1, _DIGEST = range(12)
_RAW, _VALUES, _ORDINARY, _FEW, _SUMS, _SIGNS, _PIECE, _PIECE_VALUES = (i * 8192 for i in range(8))
WEIGHTS = 64
"""Offset of the digest's weights among the constants: 1024 bytes for each order of a line's groups in their slots.
Elements of one byte have 128 orders, wider ones 64, 32 and 16."""
SCRATCH = 8 * 8192
"""Bytes of scratch memory that one thread needs, aligned to 64."""
_MANY_GROUPS = 48
"""Groups of a piece from which on the signs of its whole row are computed: pieces of the next rows share them."""
_FOLD = 8  # rows that are summed in float32 before the sums are added in float64: few enough to lose no precision
_LARGE = 1e37  # a few such numbers overflow a float32 sum, so these rows are added one by one

CODES = {
    name: code for code, name in enumerate(("direct", "table", "bf16", "f16", "i16", "u16", "i32", "u32", "i64", "u64"))
}
"""Conversions of a row's bits to numbers. All 8-bit types use a table of 256 float32 values."""
_DIRECT, _TABLE, _BF16, _F16, _I16, _U16, _I32, _U32, _I64, _U64 = CODES.values()

Function = TypeVar("Function", bound=Callable[..., Any])
# LLVM vectorises a sum of floats only if it may reorder it. NaN and inf keep their meaning, except in loops over finite
# numbers, which add `nnan`.
_REORDER = {"reassoc", "nsz", "contract"}


def _compiled(fastmath: set[str] | None = None, nogil: bool = True, **options: Any) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        compiled: Function = numba.njit(nogil=nogil, error_model="numpy", fastmath=fastmath or False, **options)(
            function
        )
        return compiled

    return decorate


def _entry(function: Function, nogil: bool = True) -> Function:
    """Compile a function that Python calls; cache it on disk if numba finds a folder."""
    try:
        return _compiled(nogil=nogil, cache=True)(function)
    except RuntimeError:
        return _compiled(nogil=nogil)(function)


def _short_entry(function: Function) -> Function:
    """The same for a function that takes less time than passing the interpreter to another thread and back."""
    return _entry(function, nogil=False)


@_compiled()
def _mix(x: Any) -> Any:
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@_compiled()
def _line_hash(line: Any, golden: Any) -> Any:
    z = line + golden
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) & np.uint64(0xFFFFFFFF)) | np.uint64(1)


@_compiled()
def _clear(numbers: Any) -> None:
    for i in range(numbers.size):
        numbers[i] = 0


@_compiled()
def _digest(words: Any, weights: Any) -> Any:
    total = np.uint64(0)
    for i in range(256):
        total += np.uint64(words[i]) * np.uint64(weights[i])  # both 32 bits wide: one vector multiply
    return total


@_compiled()
def _load(source: int, used: int, whole: int, raw: int) -> None:
    """Copy a row that is not aligned or not whole, and pad it with zeros."""
    bytes_in, bytes_out = carray(pointer(source), used, np.uint8), carray(pointer(raw), whole, np.uint8)
    for i in range(used):  # slices would take seconds to compile
        bytes_out[i] = bytes_in[i]
    for i in range(used, whole):
        bytes_out[i] = 0


def _narrow_values(code: int, row: int, table: int, out: Any) -> None:
    """Convert the elements of a row to float32."""
    halves = carray(pointer(row), ROW, np.uint16)
    if code == _TABLE:
        small, numbers = carray(pointer(row), ROW, np.uint8), carray(pointer(table), 256, np.float32)
        for i in range(ROW):
            out[i] = numbers[small[i]]
    elif code == _BF16:
        for i in range(ROW):
            out[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16)).view(np.float32)
    elif code == _F16:
        for i in range(ROW):
            half = np.uint32(halves[i])
            # The exponent comes out 112 too low; a multiplication corrects it, for denormals, too. Inf and NaN have the
            # highest exponent in either type.
            magnitude = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
            bits = np.float32(magnitude).view(np.uint32)
            if (half & np.uint32(0x7C00)) == np.uint32(0x7C00):
                bits = np.uint32(bits | np.uint32(0x7F800000))
            out[i] = np.uint32(bits | ((half & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)
    elif code == _I16:
        signed = carray(pointer(row), ROW, np.int16)
        for i in range(ROW):
            out[i] = np.float32(signed[i])
    else:
        for i in range(ROW):
            out[i] = np.float32(halves[i])


def _wide_values(code: int, row: int, table: int, out: Any) -> None:
    """Convert the elements of a row to float64."""
    if code == _I32:
        i32 = carray(pointer(row), ROW, np.int32)
        for i in range(ROW):
            out[i] = np.float64(i32[i])
    elif code == _U32:
        u32 = carray(pointer(row), ROW, np.uint32)
        for i in range(ROW):
            out[i] = np.float64(u32[i])
    elif code == _I64:
        i64 = carray(pointer(row), ROW, np.int64)
        for i in range(ROW):
            out[i] = np.float64(i64[i])
    else:
        u64 = carray(pointer(row), ROW, np.uint64)
        for i in range(ROW):
            out[i] = np.float64(u64[i])


def _convert(code: int, row: int, table: int, out: Any) -> None:
    """Convert the elements of a row to the dtype of `out`."""


@overload(_convert, strict=False)  # type: ignore[untyped-decorator]  # strict compares annotations too
def _choose(code: Any, row: Any, table: Any, out: Any) -> Callable[..., None]:
    return _narrow_values if out.dtype == types.float32 else _wide_values


@_compiled(fastmath=_REORDER)
def _sum(values: Any, n: int) -> Any:
    """Return the sum, the sum of magnitudes and the number of zeros; sums are not finite if a value is not."""
    total = 0.0
    size = 0.0
    zeros = np.int32(0)
    for i in range(n):
        x = np.float64(values[i])
        total += x
        size += abs(x)
        zeros = np.int32(zeros + np.int32(values[i] == 0))
    return total, size, zeros


@_compiled(fastmath={*_REORDER, "nnan"})
def _spread(values: Any, n: int, mean: float) -> Any:
    low = high = values[0]
    m2 = 0.0
    for i in range(n):
        x = values[i]
        low = lesser(low, x)
        high = greater(high, x)
        distance = np.float64(x) - mean
        m2 += distance * distance
    return np.float64(low), np.float64(high), m2


@_compiled()
def _part_ordinary(values: Any, n: int, edge: float, marked: Any, ordinary: Any, out: Any) -> int:
    """Gather the ordinary elements and return their number; count the others, and mark them as the sketch adds them."""
    kept = nan = posinf = neginf = beyond = 0
    low, high = np.inf, -np.inf
    for i in range(n):  # no branches: half of a mask is -inf, in an order that no branch predictor guesses
        x = values[i]  # read first: `marked` may be the same memory
        below, above = int(x <= -edge), int(x >= edge)
        marked[i] = x if abs(x) < edge else above - below
        ordinary[kept] = x  # overwritten by the next one if it is not ordinary
        kept += int(abs(x) < edge)
        nan += int(np.isnan(x))
        posinf += int(x == np.inf)
        neginf += int(x == -np.inf)
        beyond += below + above
        low = min(low, x if np.isfinite(x) else np.inf)
        high = max(high, x if np.isfinite(x) else -np.inf)
    out[_NAN] += nan
    out[_POSINF] += posinf
    out[_NEGINF] += neginf
    out[_EDGE] += beyond - posinf - neginf
    out[_MIN] = min(out[_MIN], low)
    out[_MAX] = max(out[_MAX], high)
    for i in range(n, ROW):
        marked[i] = 0
    return kept


@_compiled()
def _join(out: Any, n: float, mean: float, m2: float, low: float, high: float) -> None:
    """Combine the moments of two parts by Chan's formula."""
    before = out[_N]
    total = before + n
    if n > 0:
        delta = mean - out[_MEAN]
        out[_M2] += m2 + delta * delta * (before / total * n)
        out[_MEAN] += delta * (n / total)
        out[_N] = total
    out[_MIN] = min(out[_MIN], low)
    out[_MAX] = max(out[_MAX], high)


@_compiled()
def _moments(values: Any, n: int, edge: float, marked: Any, ordinary: Any, out: Any) -> Any:
    """Add the row to `out`; return its greatest magnitude and whether it may have other than ordinary elements.

    If it may, `marked` holds the row with what the sketch adds in their place.
    """
    low = high = 0.0
    total, size, zeros = _sum(values, n)
    clean = size < edge  # false for NaN, too
    if not clean:
        n = _part_ordinary(values, n, edge, marked, ordinary, out)
        values = ordinary
        total, size, zeros = _sum(values, n)
    if n > 0:
        low, high, m2 = _spread(values, n, total / n)
        _join(out, float(n), total / n, m2, low, high)
        out[_L1] += size
        out[_ZEROS] += zeros
    return max(-low, high), not clean


@_compiled()
def _edge(itemsize: int, code: int) -> float:
    """Return `dtypes.edge_of` the elements."""
    if code == _F16:
        return 63 / 32 * 2.0**15
    if code == _BF16 or (code == _DIRECT and itemsize == 4):
        return 63 / 32 * 2.0**127
    return 63 / 32 * 2.0**1023 if code == _DIRECT else np.inf


@_compiled()
def _signs(row: int, seed: Any, out: Any) -> None:
    """Compute the sign bits of the 128 slots, for the group of four rows that has this row."""
    first = np.uint64(row // 4) * np.uint64(128)
    key = np.uint32(_mix(np.uint32(first >> np.uint64(32))) ^ np.uint32(seed))
    low = np.uint32(first)
    for i in range(128):
        out[i] = _mix(np.uint32(np.uint32(low + np.uint32(i)) ^ key))


@_compiled()
def _moved(row: int, seed: Any) -> Any:
    """Return the number that maps the row's groups to slots by XOR."""
    high = _mix(np.uint32(np.uint64(row) >> np.uint64(32)))
    return np.int64(_mix(np.uint32(np.uint32(row) ^ high ^ np.uint32(seed))) & np.uint32(127))


@_compiled()
def _add(like: Any, sums: int, values: int, signs: Any, moved: int, row: int) -> None:
    size = 8 * like.itemsize
    shift = np.uint32(8 * (row % 4))
    for g in range(128):
        slot = g ^ moved
        add_signed(like, sums + slot * size, values + g * size, np.uint32(signs[slot] >> shift))


@_compiled()
def _fold(sums: Any, into: Any) -> None:
    for i in range(ROW):
        into[i] += np.float64(sums[i])
        sums[i] = 0


@_compiled()
def _piece_digest(raw: int, g: int, groups: int, row: int, moved: int, itemsize: int, constants: int) -> Any:
    """Return the digest of neighbouring groups of one row of the whole, from group `g` on."""
    golden = carray(pointer(constants + 8), 1, np.uint64)[0]
    bits = 7  # log2 of the groups in a line; shifts, because divisions would take most of the time of a short piece
    while (1 << (7 - bits)) < itemsize:
        bits -= 1
    of_line = 1 << bits
    words_of_group = 2 * itemsize
    weights = constants + WEIGHTS + 1024 * (256 - 2 * of_line) + (moved & (of_line - 1)) * 1024
    digest = np.uint64(0)
    end = g + groups
    while g < end:
        place = g & (of_line - 1)
        some = min(of_line - place, end - g)
        count = some * words_of_group
        total = np.uint64(0)
        if count == 256:
            total = _digest(carray(pointer(raw), 256, np.uint32), carray(pointer(weights), 256, np.uint32))
        else:
            words = carray(pointer(raw), count, np.uint32)
            weight = carray(pointer(weights + 4 * words_of_group * place), count, np.uint32)
            for i in range(count):
                total += np.uint64(words[i]) * np.uint64(weight[i])
        digest += total * _line_hash(np.uint64(row * itemsize + ((g ^ moved) >> bits)), golden)
        raw += 4 * count
        g += some
    return digest


@_compiled()
def _piece_sketch(like: Any, few: int, values: int, g: int, groups: int, row: int, moved: int, signs: Any) -> None:
    """Add neighbouring groups of one row of the whole to the sums. `signs` are those of the groups, in their order."""
    size = 8 * like.itemsize
    shift = np.uint32(8 * (row & 3))
    for i in range(groups):
        slot = (g + i) ^ moved
        add_signed(like, few + slot * size, values + i * size, np.uint32(signs[i] >> shift))


@_compiled()
def _piece_of_row(like: Any, few: int, values: int, g: int, groups: int, row: int, moved: int, signs: Any) -> None:
    """The same, with the signs of all slots of the row."""
    size = 8 * like.itemsize
    shift = np.uint32(8 * (row & 3))
    for i in range(groups):
        slot = (g + i) ^ moved
        add_signed(like, few + slot * size, values + i * size, np.uint32(signs[slot] >> shift))


@_compiled()
def _piece_signs(row: int, g: int, groups: int, moved: int, seed: Any, out: Any) -> None:
    """Compute the sign bits of neighbouring groups of one row of the whole."""
    first = np.uint64(row >> 2) * np.uint64(128)
    key = np.uint32(_mix(np.uint32(first >> np.uint64(32))) ^ np.uint32(seed))
    low = np.uint32(first)
    for i in range(groups):
        out[i] = _mix(np.uint32(np.uint32(low + np.uint32((g + i) ^ moved)) ^ key))


@_compiled()
def _shifted(source: int, count: int, shift: int, width: int, groups: int, target: int) -> int:
    """Copy elements into zeros, `shift` elements from the start of whole groups, and return where the groups are."""
    into = carray(pointer(target), groups * width, np.uint64)  # a group has 8 elements
    for i in range(width):
        into[i] = 0
        into[(groups - 1) * width + i] = 0
    copy_bytes(target + shift * width, source, count * width)
    return target


@_compiled()
def _pieces(
    raw: int,
    values: int,
    begin: int,
    n: int,
    runs: Any,
    run: int,
    signs_of: int,
    itemsize: int,
    like: Any,
    scratch: int,
    constants: int,
) -> Any:
    """Digest a row of the part and add it to the sums, piece by piece: neighbours in one row of the whole.

    `begin` is the number of its first element in the part, `run` the run that has it, and `signs_of` the four rows of
    the whole whose signs are in the scratch memory. Return the digest, the last run, and the new `signs_of`.
    """
    seeds = carray(pointer(constants), 2, np.uint32)
    signs = carray(pointer(scratch + _SIGNS), 128, np.uint32)
    full_signs = carray(pointer(scratch + _SIGNS + 1024), 128, np.uint32)
    digest = np.uint64(0)
    at, end = begin, begin + n
    while at < end:
        while runs[run + 1, 0] <= at:
            run += 1
        pos = runs[run, 1] + at - runs[run, 0]
        inside = pos & (ROW - 1)
        count = min(min(end, runs[run + 1, 0]) - at, ROW - inside)
        row, g, shift = pos >> 10, inside >> 3, inside & 7
        groups = (shift + count + 7) >> 3
        source, numbers = raw + (at - begin) * itemsize, values + (at - begin) * like.itemsize
        if shift != 0 or count & 7 != 0 or source & 7 != 0:
            source = _shifted(source, count, shift, itemsize, groups, scratch + _PIECE)
            if raw == values:  # elements that need no conversion
                numbers = source
            else:
                numbers = _shifted(numbers, count, shift, like.itemsize, groups, scratch + _PIECE_VALUES)
        moved = _moved(row, seeds[1])
        digest += _piece_digest(source, g, groups, row, moved, itemsize, constants)
        if groups >= _MANY_GROUPS and row >> 2 != signs_of:
            signs_of = row >> 2
            _signs(row, seeds[0], full_signs)
        if groups == 128:
            _add(like, scratch + _FEW, numbers, full_signs, moved, row)
        elif row >> 2 == signs_of:
            _piece_of_row(like, scratch + _FEW, numbers, g, groups, row, moved, full_signs)
        else:
            _piece_signs(row, g, groups, moved, seeds[0], signs)
            _piece_sketch(like, scratch + _FEW, numbers, g, groups, row, moved, signs)
        at += count
    return digest, run, signs_of


@_compiled()
def _find_run(runs: Any, element: int) -> int:
    """Return the run that has an element of the part."""
    low, high = 0, runs.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if runs[middle, 0] <= element:
            low = middle
        else:
            high = middle
    return low


@_compiled()
def _chunk(
    source: int,
    elements: int,
    first: int,
    layout: Any,
    like: Any,
    placed: Any,
    record: int,
    scratch: int,
    constants: int,
) -> None:
    """Summarise up to 256 rows, from row `first` on, into one record.

    `placed` has the address and the number of the runs of a part of a whole; no address if it is the whole.
    """
    itemsize, code, table = layout
    runs_at, runs_count = placed
    runs = carray(pointer(runs_at), (runs_count, 2), np.int64)
    run = _find_run(runs, first * ROW) if runs_at != 0 else 0
    signs_of = -1
    tables = constants + WEIGHTS + 1024 * (256 - 2 * (128 // itemsize))
    out = carray(pointer(record), FIELDS, np.float64)
    seeds = carray(pointer(constants), 2, np.uint32)
    golden = carray(pointer(constants + 8), 1, np.uint64)[0]
    groups = 128 // itemsize  # of a line of the digest
    signs = carray(pointer(scratch + _SIGNS), 128, np.uint32)
    sums = carray(pointer(scratch + _SUMS), ROW, np.float64)
    few = carray(pointer(scratch + _FEW), ROW, like.dtype)
    buffer = carray(pointer(scratch + _VALUES), ROW, like.dtype)
    ordinary = carray(pointer(scratch + _ORDINARY), ROW, like.dtype)
    edge = _edge(itemsize, code)
    digest = np.uint64(0)
    _clear(out)
    out[_MIN], out[_MAX] = np.inf, -np.inf
    _clear(sums)
    _clear(few)
    last = min(first + CHUNK_ROWS, (elements + ROW - 1) // ROW)
    for row in range(first, last):
        n = min(ROW, elements - row * ROW)
        start = source + row * ROW * itemsize
        if n < ROW or start % 8 != 0:
            _load(start, n * itemsize, ROW * itemsize, scratch + _RAW)
            start = scratch + _RAW
        moved = _moved(row, seeds[1])
        if runs_at == 0:
            weights = carray(pointer(tables + moved % groups * 1024), 256, np.uint32)
            for k in range(itemsize):
                words = carray(pointer(start + k * 1024), 256, np.uint32)
                line = np.uint64(row * itemsize + (k ^ (moved // groups)))
                digest += _digest(words, weights) * _line_hash(line, golden)
        at = start
        if code != _DIRECT:
            at = scratch + _VALUES
            _convert(code, start, table, buffer)
        largest, cleaned = _moments(carray(pointer(at), ROW, like.dtype), n, edge, buffer, ordinary, out)
        if cleaned:
            at = scratch + _VALUES
        if largest > _LARGE:
            _fold(few, sums)
        if runs_at != 0:
            more, run, signs_of = _pieces(
                start, at, row * ROW, n, runs, run, signs_of, itemsize, like, scratch, constants
            )
            digest += more
        else:
            if row % 4 == 0 or row == first:
                _signs(row, seeds[0], signs)
            _add(like, scratch + _FEW, at, signs, moved, row)
        if (row - first) % _FOLD == _FOLD - 1 or row == last - 1 or largest > _LARGE:
            _fold(few, sums)
    carray(pointer(record), FIELDS, np.uint64)[_DIGEST] = digest
    sketch = carray(pointer(record + 8 * FIELDS), 256, np.float64)
    _clear(sketch)
    for i in range(ROW):
        sketch[(2 * (i // 8) + 29 * (i % 8)) % 256] += sums[i]


@_entry
def run(
    source: int,
    elements: int,
    itemsize: int,
    code: int,
    table: int,
    like: Any,
    counter: int,
    records: int,
    scratch: int,
    constants: int,
    runs: int,
    runs_count: int,
) -> None:
    """Work on chunks, as numbers of the dtype of `like`, until none is left. Many threads may run it at once.

    `runs` is the address of `runs_count` rows of `PlacedRuns.table`; 0 for a whole tensor.
    """
    chunks = (elements + CHUNK_ROWS * ROW - 1) // (CHUNK_ROWS * ROW)
    layout = (itemsize, code, table)
    while True:
        chunk = take(counter)
        if chunk >= chunks:
            return
        record = records + chunk * RECORD * 8
        _chunk(source, elements, chunk * CHUNK_ROWS, layout, like, (runs, runs_count), record, scratch, constants)


@_entry
def finish(records: int, chunks: int, sketch: Any) -> None:
    """Join all chunks in order into the first record, and copy its sketch into `sketch`."""
    out, integers = carray(pointer(records), RECORD, np.float64), carray(pointer(records), FIELDS, np.uint64)
    for chunk in range(1, chunks):
        more = carray(pointer(records + chunk * RECORD * 8), RECORD, np.float64)
        integers[_DIGEST] += carray(pointer(records + chunk * RECORD * 8), FIELDS, np.uint64)[_DIGEST]
        if more[_N] > 0 or more[_EDGE] > 0:
            _join(out, more[_N], more[_MEAN], more[_M2], more[_MIN], more[_MAX])
        for field in (_NAN, _POSINF, _NEGINF, _ZEROS, _EDGE, _L1):
            out[field] += more[field]
        for i in range(FIELDS, RECORD):
            out[i] += more[i]
    for i in range(256):
        sketch[i] = out[FIELDS + i]


ITEM = 7
"""Fields of 8 bytes that describe an array of a batch: where its copy is; its elements and bytes; the size, conversion
and table of its elements; and whether they are converted to float64."""


@_short_entry
def copy_in(source: int, elements: int, layout: int, item: int, room: int) -> None:
    """Copy an array into `room` and describe it in `item`. `layout` is the address of an item's last four fields."""
    fields, given = carray(pointer(item), ITEM, np.int64), carray(pointer(layout), 4, np.int64)
    size = elements * given[0]
    fields[0], fields[1], fields[2] = room, elements, size
    for i in range(4):
        fields[3 + i] = given[i]
    bytes_in, bytes_out = carray(pointer(source), size, np.uint8), carray(pointer(room), size, np.uint8)
    for i in range(size):
        bytes_out[i] = bytes_in[i]


@_short_entry
def is_copy(item: int, source: int) -> bool:
    """Return whether the bytes at `source` are still those that `copy_in` has copied."""
    fields = carray(pointer(item), ITEM, np.int64)
    size = fields[2]
    here, there = carray(pointer(source), size, np.uint8), carray(pointer(fields[0]), size, np.uint8)
    different = np.uint8(0)
    for i in range(size):
        different |= here[i] ^ there[i]
    return bool(different == 0)


@_entry
def run_many(items: int, count: int, results: int, sketches: int, scratch: int, constants: int) -> None:
    """Summarise arrays of at most one chunk each: FIELDS numbers of each into `results`, 256 into `sketches`.

    The first RECORD numbers of scratch memory hold the record of one array, the rest is for `_chunk`.
    """
    record = scratch
    numbers = carray(pointer(record), RECORD, np.float64)
    for at in range(count):
        item = carray(pointer(items + at * ITEM * 8), ITEM, np.int64)
        layout = (item[3], item[4], item[5])
        if item[6] != 0:
            wide = carray(pointer(record), 0, np.float64)
            _chunk(item[0], item[1], 0, layout, wide, (0, 0), record, scratch + RECORD * 8, constants)
        else:
            narrow = carray(pointer(record), 0, np.float32)
            _chunk(item[0], item[1], 0, layout, narrow, (0, 0), record, scratch + RECORD * 8, constants)
        out = carray(pointer(results + at * FIELDS * 8), FIELDS, np.float64)
        sketch = carray(pointer(sketches + at * 1024), 256, np.float32)
        for i in range(FIELDS):
            out[i] = numbers[i]
        for i in range(256):
            sketch[i] = numbers[FIELDS + i]


WORK = 12
"""Arguments of a member of the team in 8-byte fields: those of `run` except `like` and `scratch`, then the scratch
memory of all members and the counter of members."""


@_compiled()
def _member(work: Any, like: Any) -> None:
    scratch = work[10] + take(work[11]) * SCRATCH
    run(work[0], work[1], work[2], work[3], work[4], like, work[5], work[6], scratch, work[7], work[8], work[9])


def _narrow_member(arguments: Any) -> None:
    work = carray(arguments, WORK, np.int64)
    _member(work, carray(pointer(work[0]), 0, np.float32))


def _wide_member(arguments: Any) -> None:
    work = carray(arguments, WORK, np.int64)
    _member(work, carray(pointer(work[0]), 0, np.float64))


_entries: dict[int, Any] = {}


def team_entry(like: Any) -> int:
    """Return the address of a C function that runs one thread's part of `run`: void (*)(int64_t work[WORK])."""
    entry = _entries.get(like.itemsize)
    if entry is None:
        member = _narrow_member if like.itemsize == 4 else _wide_member
        signature = types.void(types.voidptr)
        try:
            entry = numba.cfunc(signature, nogil=True, cache=True)(member)
        except (RuntimeError, OSError):  # no folder for the cache, or no space in it
            entry = numba.cfunc(signature, nogil=True)(member)
        _entries[like.itemsize] = entry
    address: int = entry.address
    return address
