"""The compiled loops over pairs of tensors: one pass over the bytes of both, row after row of 1024 elements.

A row of either side is read into the first-level cache once, as float32 if that holds every element of both exactly,
else as float64. Rows with equal bytes are measured once, for both sides. Rows with non-finite elements are cleaned
first, and only they pay for it.

Moments are sums of distances from the row's first element. This element is one of the terms, so a row loses at most ten
of 53 bits, and a constant row has no spread.

As in `summary.rows`, memory is passed as addresses, and numba's cache watches this file only: touch it after a change
in a file that it imports loops from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from tensortap.kernels.jit import compiled, entry
from tensortap.kernels.pairs.integers import integer_gaps, integer_place, whole_numbers
from tensortap.kernels.pairs.lines import FIELDS as LINE_FIELDS
from tensortap.kernels.pairs.lines import (
    LINE_PLACES,
    LINES,
    add_lines,
    add_same_lines,
    add_to_line,
    begin_lines,
    line_at,
    worst_line,
)
from tensortap.kernels.pairs.reference import CHUNK
from tensortap.kernels.pairs.ulps import INTEGERS, steps_apart
from tensortap.kernels.summary.elements import CODES, ROW, convert, load
from tensortap.kernels.summary.rows import CHUNK_ROWS
from tensortap.kernels.vectors import greater, pointer, take

__all__ = ["DOT", "FIELDS", "PLACES", "SCRATCH", "SIDE", "WORST", "finish", "run"]

assert CHUNK == CHUNK_ROWS * ROW
FIELDS = LINES + LINE_FIELDS
"""Numbers in a record. Positions count components in the whole tensor; -1 means none."""
_START, _ELEMENTS, _UNLIKE, _GAP2, _R2, _C2, _OUTSIDE, _ULP = range(8)
_TOP, _TOP_AT, _TOP_R, _TOP_C, _WRONG, _WRONG_AT, _WRONG_R, _WRONG_C = range(8, 16)
SIDE = (16, 24)
"""Offsets of the sides' own statistics in a record."""
_N, _MEAN, _M2, _NAN, _POSINF, _NEGINF = range(6)
DOT = 22
"""Offset of the scalar product."""
WORST = LINES + 2
"""Offset of the worst line's squared error; the line's number follows it."""
_NAMES = "start elements unlike gap2 r2 c2 outside ulp top top_at top_r top_c wrong wrong_at wrong_r wrong_c"
_SIDE_NAMES = "n mean m2 nan posinf neginf"
PLACES = {
    **{name: place for place, name in enumerate(_NAMES.split())},
    **{f"{side}_{name}": SIDE[i] + j for i, side in enumerate("rc") for j, name in enumerate(_SIDE_NAMES.split())},
    "dot": DOT,
    **LINE_PLACES,
}
"""Offset of each number of a record, for other code that makes records."""

_RAW_R, _RAW_C, _ROW_R, _ROW_C, _FINITE, _NARROW, _LINES = (i * 8192 for i in range(7))
SCRATCH = 8 * 8192
"""Bytes of scratch memory that one thread needs, aligned to 64."""

_DIRECT = CODES["direct"]
_REORDER = {"reassoc", "nsz", "contract"}


@compiled()
def _same_bytes(a: int, b: int, words: int) -> Any:
    left, right = carray(pointer(a), words, np.uint64), carray(pointer(b), words, np.uint64)
    if left[0] != right[0] or left[1] != right[1]:  # the usual case if rows differ
        return False
    unlike = np.uint64(0)
    for i in range(words):
        unlike |= left[i] ^ right[i]
    return unlike == 0


@compiled()
def _fetch(source: int, n: int, itemsize: int, raw: int) -> Any:
    """Return the address of the row: in place if it is whole and aligned, else of a copy."""
    if n == ROW and source % 8 == 0:
        return source
    load(source, n * itemsize, ROW * itemsize, raw)
    return raw


@compiled()
def _numbers(like: Any, layout: Any, raw: int, buffer: int, narrow: int) -> Any:
    """Return the address of the row as numbers of `like`'s dtype."""
    itemsize, code, table, wide = layout
    if code == _DIRECT and itemsize == like.itemsize:
        return raw
    out = carray(pointer(buffer), ROW, like.dtype)
    if like.itemsize == 4 or wide:
        convert(code, raw, table, out)
        return buffer
    at = raw
    if code != _DIRECT:
        at = narrow
        convert(code, raw, table, carray(pointer(narrow), ROW, np.float32))
    numbers = carray(pointer(at), ROW, np.float32)
    for i in range(ROW):
        out[i] = np.float64(numbers[i])
    return buffer


@compiled(fastmath=_REORDER)
def _own(values: Any, n: int) -> Any:
    """Return sums of one side's distances from its first element; not finite if a value is not."""
    first = np.float64(values[0])
    total = squares = 0.0
    for i in range(n):
        x = np.float64(values[i]) - first
        total += x
        squares += x * x
    return total, squares


@compiled(fastmath=_REORDER)
def _both(r: Any, c: Any, n: int, rtol: float, atol: float) -> Any:
    """Return these sums for both sides, and sums over their differences."""
    r_first, c_first = np.float64(r[0]), np.float64(c[0])
    r_total = r_squares = c_total = c_squares = gap2 = dot = top = 0.0
    outside = 0
    for i in range(n):
        x, y = np.float64(r[i]), np.float64(c[i])
        gap = abs(y - x)
        gap2 += gap * gap
        dot += x * y
        top = greater(top, gap)
        outside += np.int64(gap > atol + rtol * abs(x))
        x -= r_first
        y -= c_first
        r_total += x
        r_squares += x * x
        c_total += y
        c_squares += y * y
    return r_total, r_squares, c_total, c_squares, gap2, dot, top, outside


@compiled()
def _place(r: Any, c: Any, n: int, top: float) -> Any:
    for i in range(n):
        if abs(np.float64(c[i]) - np.float64(r[i])) == top:
            return i
    return 0


@compiled()
def _join(out: Any, side: int, n: float, mean: float, m2: float) -> None:
    """Combine the moments of two parts by Chan's formula."""
    before = out[side + _N]
    if before == 0:  # avoids 0 * inf after an overflow
        out[side + _N], out[side + _MEAN], out[side + _M2] = n, mean, m2
        return
    total = before + n
    delta = mean - out[side + _MEAN]
    out[side + _M2] += m2 + delta * delta * (before / total * n)
    out[side + _MEAN] += delta * (n / total)
    out[side + _N] = total


@compiled()
def _moments(first: float, total: float, squares: float, n: int) -> Any:
    """Return the mean and the sum of squared distances from it."""
    return first + total / n, max(squares - total * total / n, 0.0)


@compiled()
def _part_finite(values: Any, n: int, finite: Any, out: Any, side: int) -> Any:
    """Count non-finite elements and gather the finite ones; return their number."""
    kept = nan = posinf = neginf = 0
    for i in range(n):
        x = values[i]
        finite[kept] = x  # overwritten by the next one if it is not finite
        kept += int(np.isfinite(x))
        nan += int(np.isnan(x))
        posinf += int(x == np.inf)
        neginf += int(x == -np.inf)
    out[side + _NAN] += nan
    out[side + _POSINF] += posinf
    out[side + _NEGINF] += neginf
    return kept


@compiled()
def _join_finite(values: Any, n: int, finite: Any, out: Any, side: int) -> Any:
    """Add the finite elements of a row to one side's moments; return their sum of squares."""
    n = _part_finite(values, n, finite, out, side)
    if n == 0:
        return 0.0
    total, squares = _own(finite, n)
    mean, m2 = _moments(np.float64(finite[0]), total, squares, n)
    _join(out, side, float(n), mean, m2)
    return m2 + n * (mean * mean)


@compiled()
def _clean(r: Any, c: Any, n: int, r_out: Any, c_out: Any, out: Any, position: int) -> None:
    """Set both sides to zero where one is not finite; record where the sides disagree."""
    for i in range(n):
        x, y = r[i], c[i]
        if np.isfinite(x) and np.isfinite(y):
            r_out[i], c_out[i] = x, y
            continue
        r_out[i] = c_out[i] = 0
        if x != y and not (np.isnan(x) and np.isnan(y)):
            if out[_WRONG] == 0:
                out[_WRONG_AT], out[_WRONG_R], out[_WRONG_C] = position + i, x, y
            out[_WRONG] += 1


@compiled()
def _same_row(values: Any, n: int, finite: Any, out: Any) -> Any:
    """Add a row that is equal on both sides to the statistics of both; return its sum of squares."""
    total, squares = _own(values, n)
    if np.isfinite(squares):
        mean, m2 = _moments(np.float64(values[0]), total, squares, n)
        size = m2 + n * (mean * mean)
        for side in SIDE:
            _join(out, side, float(n), mean, m2)
    else:
        size = _join_finite(values, n, finite, out, SIDE[0])
        _join_finite(values, n, finite, out, SIDE[1])
    for field in (_R2, _C2, DOT):
        out[field] += size
    return size


@compiled()
def _chunk(
    sources: Any, elements: int, first: int, like: Any, layouts: Any, rules: Any, unit: Any, record: int, scratch: int
) -> None:
    """Measure up to 256 rows, from row `first` on, into one record."""
    r_layout, c_layout = layouts
    rtol, atol, same_dtype, start, line, floor2 = rules
    out = carray(pointer(record), FIELDS, np.float64)
    for i in range(FIELDS):
        out[i] = 0
    out[_START] = start + first * ROW
    out[_TOP_AT] = out[_WRONG_AT] = -1
    begin_lines(out, line, floor2)
    codes = (r_layout[1], c_layout[1])
    integers = whole_numbers(codes)
    finite = carray(pointer(scratch + _FINITE), ROW, like.dtype)
    r_buffer = carray(pointer(scratch + _ROW_R), ROW, like.dtype)
    c_buffer = carray(pointer(scratch + _ROW_C), ROW, like.dtype)
    number, left = line_at(np.int64(start + first * ROW), line)
    n = 0
    for row in range(first, min(first + CHUNK_ROWS, (elements + ROW - 1) // ROW)):
        position = start + row * ROW
        if n < left:  # the line of the previous row continues
            left -= n
        else:
            number, left = line_at(position, line)
        n = min(ROW, elements - row * ROW)
        out[_ELEMENTS] += n
        r_raw = _fetch(sources[0] + row * ROW * r_layout[0], n, r_layout[0], scratch + _RAW_R)
        c_raw = _fetch(sources[1] + row * ROW * c_layout[0], n, c_layout[0], scratch + _RAW_C)
        r_at = _numbers(like, r_layout, r_raw, scratch + _ROW_R, scratch + _NARROW)
        r = carray(pointer(r_at), ROW, like.dtype)
        if same_dtype and _same_bytes(r_raw, c_raw, ROW * r_layout[0] // 8):
            add_same_lines(out, number, left, n, like, r_at, _same_row(r, n, finite, out))
            continue
        c_at = _numbers(like, c_layout, c_raw, scratch + _ROW_C, scratch + _NARROW)
        c = carray(pointer(c_at), ROW, like.dtype)
        r_total, r_squares, c_total, c_squares, gap2, dot, top, outside = _both(r, c, n, rtol, atol)
        cleaned = not (np.isfinite(r_squares) and np.isfinite(c_squares))
        if cleaned:
            _join_finite(r, n, finite, out, SIDE[0])
            _join_finite(c, n, finite, out, SIDE[1])
            _clean(r, c, n, r_buffer, c_buffer, out, position)
            r_at, c_at, r, c = scratch + _ROW_R, scratch + _ROW_C, r_buffer, c_buffer
            r_total, r_squares, c_total, c_squares, gap2, dot, top, outside = _both(r, c, n, rtol, atol)
        r_mean, r_m2 = _moments(np.float64(r[0]), r_total, r_squares, n)
        c_mean, c_m2 = _moments(np.float64(c[0]), c_total, c_squares, n)
        if not cleaned:
            _join(out, SIDE[0], float(n), r_mean, r_m2)
            _join(out, SIDE[1], float(n), c_mean, c_m2)
        if integers:
            gap2, top, outside = integer_gaps(r_raw, c_raw, n, codes, rtol, atol)
        r2 = r_m2 + n * (r_mean * r_mean)
        if n <= left:
            add_to_line(out, number, gap2, r2, n == left)
        else:
            add_lines(out, number, left, n, like, (r_at, c_at), (r_raw, c_raw), codes, gap2, r2, scratch + _LINES)
        out[_R2] += r2
        out[_C2] += c_m2 + n * (c_mean * c_mean)
        out[_GAP2] += gap2
        out[DOT] += dot
        out[_OUTSIDE] += outside
        if same_dtype or top > 0:
            out[_UNLIKE] = 1
        if top > out[_TOP]:
            i = integer_place(r_raw, c_raw, n, codes, top) if integers else _place(r, c, n, top)
            out[_TOP], out[_TOP_AT], out[_TOP_R], out[_TOP_C] = top, position + i, r[i], c[i]
        if unit[0] == INTEGERS:
            out[_ULP] = out[_TOP]
        elif top > 0:
            steps = steps_apart(like, unit, r_layout[0], (r_raw, c_raw), (r_at, c_at), cleaned, n)
            out[_ULP] = max(out[_ULP], steps)
    if out[_WRONG] > 0:
        out[_UNLIKE] = 1


@entry
def run(
    sources: Any,
    elements: int,
    like: Any,
    layouts: Any,
    rules: Any,
    unit: Any,
    counter: int,
    records: int,
    scratch: int,
) -> None:
    """Work on chunks, as numbers of `like`'s dtype, until none is left. Many threads may run it at once.

    sources: both addresses. layouts: (itemsize, code, table, wide) of both. rules: (rtol, atol, same dtype, position of
    the first element, length of a line, squared floor of a line's size). unit: (mode, mantissa bits, lowest exponent)
    of the coarser type.
    """
    chunks = (elements + CHUNK - 1) // CHUNK
    while True:
        chunk = take(counter)
        if chunk >= chunks:
            return
        at = records + chunk * FIELDS * 8
        _chunk(sources, elements, chunk * CHUNK_ROWS, like, layouts, rules, unit, at, scratch)


@entry
def finish(records: Any) -> None:
    """Join all records into the first, in order."""
    worst_line(records)
    out = records[0]
    for chunk in range(1, records.shape[0]):
        more = records[chunk]
        for field in (_ELEMENTS, _GAP2, _R2, _C2, _OUTSIDE, DOT):
            out[field] += more[field]
        out[_UNLIKE] = max(out[_UNLIKE], more[_UNLIKE])
        out[_ULP] = max(out[_ULP], more[_ULP])
        if more[_TOP] > out[_TOP]:
            out[_TOP : _TOP + 4] = more[_TOP : _TOP + 4]
        if out[_WRONG] == 0:
            out[_WRONG_AT : _WRONG_AT + 3] = more[_WRONG_AT : _WRONG_AT + 3]
        out[_WRONG] += more[_WRONG]
        for side in SIDE:
            if more[side + _N] > 0:
                _join(out, side, more[side + _N], more[side + _MEAN], more[side + _M2])
            for field in (_NAN, _POSINF, _NEGINF):
                out[side + field] += more[side + field]
