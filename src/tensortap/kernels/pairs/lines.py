"""Compiled loops that measure each row of a tensor on its own; `rows` calls them.

Here a row of the tensor is called a line, because a row of these kernels has 1024 elements. A line may span many rows
and chunks, and a row may hold many lines. A chunk's record keeps the worst line that lies within the chunk. It also has
two sums of each line that it holds in part: the line that continues at its start, and the line that is open at its end.
Chunks begin at fixed positions, so these sums are always divided the same way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from tensortap.kernels.jit import compiled
from tensortap.kernels.pairs.integers import integer_gaps, whole_numbers
from tensortap.kernels.summary.elements import ROW
from tensortap.kernels.vectors import greater, never_inlined, pointer

__all__ = [
    "FIELDS",
    "LINES",
    "LINE_PLACES",
    "add_lines",
    "add_same_lines",
    "add_to_line",
    "begin_lines",
    "line_at",
    "worst_line",
]

LINES = 32
"""Offset of the numbers of lines in a record."""
FIELDS = 8
_LENGTH, _FLOOR2, _WORST, _WORST_AT, _HEAD_GAP2, _HEAD_SIZE2, _OPEN_GAP2, _OPEN_SIZE2 = range(LINES, LINES + FIELDS)
LINE_PLACES = {
    "line": _LENGTH,
    "floor2": _FLOOR2,
    "worst": _WORST,
    "worst_at": _WORST_AT,
    "head_gap2": _HEAD_GAP2,
    "head_size2": _HEAD_SIZE2,
    "open_gap2": _OPEN_GAP2,
    "open_size2": _OPEN_SIZE2,
}
_START, _ELEMENTS = 0, 1  # as in `rows`
_REORDER = {"reassoc", "nsz", "contract"}


@compiled()
def begin_lines(out: Any, length: int, floor2: float) -> None:
    out[_LENGTH], out[_FLOOR2], out[_WORST_AT] = length, floor2, -1


@compiled(fastmath=_REORDER)
def _sums(r: Any, c: Any, n: int) -> Any:
    gap2 = size2 = 0.0
    for i in range(n):
        x = np.float64(r[i])
        gap = np.float64(c[i]) - x
        gap2 += gap * gap
        size2 += x * x
    return gap2, size2


@compiled(fastmath=_REORDER)
def _squares(values: Any, n: int) -> Any:
    total = 0.0
    for i in range(n):
        total += np.float64(values[i]) * np.float64(values[i])
    return total


@compiled()
def _finite_squares(values: Any, n: int) -> Any:
    total = _squares(values, n)
    if np.isfinite(total):
        return total
    total = 0.0
    for i in range(n):
        if np.isfinite(values[i]):
            total += np.float64(values[i]) * np.float64(values[i])
    return total


@compiled()
def _ratio(gap2: float, size2: float, floor2: float) -> Any:
    return gap2 / (size2 if size2 > floor2 else floor2) if gap2 > 0 else 0.0


@compiled()
def _close(out: Any, number: int) -> None:
    """Finish the open line."""
    never_inlined()
    if number * out[_LENGTH] < out[_START]:
        out[_HEAD_GAP2], out[_HEAD_SIZE2] = out[_OPEN_GAP2], out[_OPEN_SIZE2]
    else:
        ratio = _ratio(out[_OPEN_GAP2], out[_OPEN_SIZE2], out[_FLOOR2])
        if ratio > out[_WORST]:
            out[_WORST], out[_WORST_AT] = ratio, number
    out[_OPEN_GAP2] = out[_OPEN_SIZE2] = 0


@compiled()
def line_at(position: int, length: int) -> Any:
    """Return the number of an element's line, and how many elements the line has from there on."""
    number = position // length
    return number, length - (position - number * length)


@compiled()
def add_to_line(out: Any, number: int, gap2: float, size2: float, ends: bool) -> None:
    """Add sums to the open line."""
    out[_OPEN_GAP2] += gap2
    out[_OPEN_SIZE2] += size2
    if ends:
        _close(out, number)


@compiled()
def add_lines(
    out: Any,
    number: int,
    left: int,
    n: int,
    like: Any,
    at: Any,
    raw: Any,
    codes: Any,
    gap2: float,
    size2: float,
    scratch: int,
) -> None:
    """Add a row of `n` elements in which at least one line ends and another begins; the first has `left` elements.

    at, raw: both addresses, as numbers of `like`'s dtype and as in memory. gap2, size2: sums of the whole row.
    """
    never_inlined()
    gaps, sizes = carray(pointer(scratch), ROW, np.float64), carray(pointer(scratch + 8192), ROW, np.float64)
    length = np.int64(out[_LENGTH])
    if n - left <= length:
        _two_lines(like, at, raw, codes, n, left, (gap2, size2), gaps, sizes)
    else:
        _many_lines(like, at, raw, codes, n, left, length, gaps, sizes)
    add_to_line(out, number, gaps[0], sizes[0], True)
    whole = (n - left) // length
    worst = _worst_of(gaps, sizes, whole, out[_FLOOR2])
    if worst > out[_WORST]:
        place = 1
        while place < whole and _ratio(gaps[place], sizes[place], out[_FLOOR2]) != worst:
            place += 1
        out[_WORST], out[_WORST_AT] = worst, number + place
    if n - left > whole * length:
        out[_OPEN_GAP2], out[_OPEN_SIZE2] = gaps[whole + 1], sizes[whole + 1]


@compiled()
def _two_lines(like: Any, at: Any, raw: Any, codes: Any, n: int, left: int, whole: Any, gaps: Any, sizes: Any) -> None:
    """Sum the shorter part, and take the other part's sums as the rest of the whole row's."""
    first_is_shorter = 2 * left <= n
    shorter, longer = ((0, left), (left, n - left)) if first_is_shorter else ((left, n - left), (0, left))
    gap2, size2 = _piece(like, at, raw, codes, shorter)
    rest_gap2, rest_size2 = whole[0] - gap2, whole[1] - size2
    if rest_gap2 < whole[0] / 8 or rest_size2 < whole[1] / 8:  # too small a rest to be exact
        rest_gap2, rest_size2 = _piece(like, at, raw, codes, longer)
    place = 0 if first_is_shorter else 1
    gaps[place], sizes[place] = gap2, size2
    gaps[1 - place], sizes[1 - place] = rest_gap2, rest_size2


@compiled()
def _piece(like: Any, at: Any, raw: Any, codes: Any, part: Any) -> Any:
    begin, n = part
    r = carray(pointer(at[0] + begin * like.itemsize), ROW, like.dtype)
    c = carray(pointer(at[1] + begin * like.itemsize), ROW, like.dtype)
    gap2, size2 = _sums(r, c, n)
    if whole_numbers(codes):
        gap2 = integer_gaps(raw[0] + 8 * begin, raw[1] + 8 * begin, n, codes, 0.0, 0.0)[0]
    return gap2, size2


@compiled(fastmath=_REORDER)
def _many_lines(
    like: Any, at: Any, raw: Any, codes: Any, n: int, left: int, length: int, gaps: Any, sizes: Any
) -> None:
    done = piece = 0
    some = left
    while done < n:
        r = carray(pointer(at[0] + done * like.itemsize), ROW, like.dtype)
        c = carray(pointer(at[1] + done * like.itemsize), ROW, like.dtype)
        gap2 = size2 = 0.0
        for i in range(some):  # inlined: a call for each short line would take twice the time
            x = np.float64(r[i])
            gap = np.float64(c[i]) - x
            gap2 += gap * gap
            size2 += x * x
        gaps[piece], sizes[piece] = gap2, size2
        done += some
        piece += 1
        some = min(length, n - done)
    if whole_numbers(codes):
        done, some = 0, left
        for i in range(piece):
            gaps[i] = integer_gaps(raw[0] + 8 * done, raw[1] + 8 * done, some, codes, 0.0, 0.0)[0]
            done += some
            some = min(length, n - done)


@compiled()
def _worst_of(gaps: Any, sizes: Any, whole: int, floor2: float) -> Any:
    """Return the worst ratio of the lines after the first."""
    worst = 0.0
    for i in range(whole):
        worst = greater(worst, _ratio(gaps[i + 1], sizes[i + 1], floor2))
    return worst


@compiled()
def add_same_lines(out: Any, number: int, left: int, n: int, like: Any, at: int, size2: float) -> None:
    """Add a row that is equal on both sides: only lines that continue in other rows matter."""
    never_inlined()
    if n <= left:
        add_to_line(out, number, 0.0, size2, n == left)
        return
    out[_OPEN_SIZE2] += _finite_squares(carray(pointer(at), ROW, like.dtype), left)
    _close(out, number)
    rest = (n - left) % np.int64(out[_LENGTH])
    last = carray(pointer(at + (n - rest) * like.itemsize), ROW, like.dtype)
    out[_OPEN_SIZE2] = _finite_squares(last, rest)


@compiled()
def worst_line(records: Any) -> None:
    """Store the worst line of all records, which are in order, in the first record."""
    worst, worst_at = 0.0, -1.0
    gap2 = size2 = 0.0
    length, floor2 = np.int64(records[0, _LENGTH]), records[0, _FLOOR2]
    number = np.int64(0)
    for i in range(records.shape[0]):
        record = records[i]
        start, elements = np.int64(record[_START]), np.int64(record[_ELEMENTS])
        number = start // length
        within = start - number * length
        if within > 0 and within + elements >= length:
            gap2 += record[_HEAD_GAP2]
            size2 += record[_HEAD_SIZE2]
            if _ratio(gap2, size2, floor2) > worst:
                worst, worst_at = _ratio(gap2, size2, floor2), float(number)
            gap2 = size2 = 0.0
        if record[_WORST] > worst:
            worst, worst_at = record[_WORST], record[_WORST_AT]
        gap2 += record[_OPEN_GAP2]
        size2 += record[_OPEN_SIZE2]
        number = (start + elements - 1) // length
    if _ratio(gap2, size2, floor2) > worst:  # a range may end within a line
        worst, worst_at = _ratio(gap2, size2, floor2), float(number)
    records[0, _WORST], records[0, _WORST_AT] = worst, worst_at
