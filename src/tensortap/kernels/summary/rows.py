"""The compiled loops of the CPU kernel: one pass over memory, row after row of 1024 elements.

A row is read into the first-level cache once, as float32 if that is exact, else as float64. Two short loops then pass
over it: digest, and both moments and sketch, for four rows at a time. Other rows take a loop for each of the three.
`elements`, `moments`, `positions`, `whole_rows` and, for parts of a tensor, `plans` and `groups` have these loops; here
are the functions that Python calls.

Memory is passed as addresses: a call costs a microsecond less, and elements of all types share one compiled function.
numba's cache watches this file only: after a change in a file that it imports loops from, touch it. Constants of the
definition are passed as tables for the same reason.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import carray, types

from tensortap.kernels.jit import compiled, entry
from tensortap.kernels.summary.elements import CODES, DIRECT, ROW, convert, edge_of, load
from tensortap.kernels.summary.groups import add_groups
from tensortap.kernels.summary.moments import (
    COUNT,
    DIGEST,
    EDGE,
    L1,
    M2,
    MAX,
    MEAN,
    MIN,
    NAN,
    NEGINF,
    POSINF,
    ZEROS,
    add_moments,
    join,
)
from tensortap.kernels.summary.plans import PLAN_LISTS, find_run, plan_row, scratch_plan, whole_row
from tensortap.kernels.summary.positions import WEIGHTS, add_row, digest_line, line_hash, moved_by, signs_of_row
from tensortap.kernels.summary.scratch import FEW, GROUPS, NEXT, ORDINARY, RAW, SCRATCH, SIGNS, SUMS, VALUES
from tensortap.kernels.summary.whole_rows import BLOCK, add_block
from tensortap.kernels.vectors import copy_bytes, never_inlined, pointer, take

__all__ = [
    "CHUNK_ROWS",
    "CODES",
    "CUT",
    "FIELDS",
    "FIRSTS",
    "LISTS",
    "PLACED",
    "RECORD",
    "RUNS",
    "RUNS_COUNT",
    "SCRATCH",
    "WEIGHTS",
    "WORK",
    "add_chunk",
    "finish",
    "join_chunks",
    "plan_part",
    "run",
    "team_entry",
]

CHUNK_ROWS = 256
"""Rows in a chunk, the unit of work of a thread. Fixed, so that the number of threads does not change the result."""
FIELDS = 16
RECORD = FIELDS + 256
"""A chunk's result in 8-byte fields: the numbers of `moments`, then the sketch in float64."""
RUNS, RUNS_COUNT, CUT, FIRSTS, LISTS = range(5)
PLACED = LISTS + len(PLAN_LISTS)
"""Numbers that describe a part: address and number of the rows of `PlacedRuns.table`; whether it has parts of groups;
the addresses of the first entry of each row in a plan that was made before, and of the plan's lists, or 0."""
_FOLD = 8  # rows that are summed in float32 before the sums are added in float64: few enough to lose no precision
_CAREFUL = 16  # rows that are added one by one after a block that could not be: its neighbours are often alike
_LARGE = 1e37  # a few such numbers overflow a float32 sum, so these rows are added one by one


@compiled()
def _clear(numbers: Any) -> None:
    for i in range(numbers.size):
        numbers[i] = 0


@compiled()
def _fold(like: Any, at: int, into: Any) -> None:
    sums = carray(pointer(at), ROW, like.dtype)
    for i in range(ROW):
        into[i] += np.float64(sums[i])
        sums[i] = 0


@compiled()
def _groups_of_row(placed: Any, row: int, n: int, run: int, itemsize: int, room: int, seeds: Any, golden: Any) -> Any:
    """Return which row of the whole a row of the part is, or -1 and its groups: their number and their plan.

    Also return a run to continue from. `run` is one at or before the row's first element; -1 if none is known.
    """
    never_inlined()
    runs = carray(pointer(placed[RUNS]), (placed[RUNS_COUNT], 2), np.int64)
    plan = scratch_plan(room)
    if placed[FIRSTS] != 0:
        firsts = carray(pointer(placed[FIRSTS]), row + 2, np.int64)
        first = firsts[row]
        if firsts[row + 1] > first:
            at = (placed[LISTS] + 4 * first, placed[LISTS + 1] + first, placed[LISTS + 2] + first)
            return -1, run, firsts[row + 1] - first, (*at, placed[LISTS + 3] + first, placed[LISTS + 4] + 2 * first)
    if run < 0:
        run = find_run(runs, row * ROW)
    while runs[run + 1, 0] <= row * ROW:
        run += 1
    where = whole_row(runs, run, row) if n == ROW else -1
    if where >= 0:
        return where, run, 0, plan
    count, run = plan_row(row * ROW, n, runs, run, itemsize, seeds, golden, plan)
    return where, run, count, plan


@compiled()
def _digest_row(start: int, where: int, moved: int, itemsize: int, tables: int, golden: Any) -> Any:
    """Return the digest of a row in memory, which is row `where` of the whole."""
    line_groups = 128 // itemsize
    weights = carray(pointer(tables + moved % line_groups * 1024), 128, np.uint64)
    digest = np.uint64(0)
    for k in range(itemsize):
        words = carray(pointer(start + k * 1024), 128, np.uint64)
        line = np.uint64(where * itemsize + (k ^ (moved // line_groups)))
        digest += digest_line(words, weights) * line_hash(line, golden)
    return digest


@compiled()
def _digest_block(start: int, where: int, itemsize: int, seed: Any, tables: int, golden: Any) -> Any:
    """Return the numbers that map the groups of each row of a block to slots, and the digest of all rows."""
    moved = (moved_by(where, seed), moved_by(where + 1, seed), moved_by(where + 2, seed), moved_by(where + 3, seed))
    digest = np.uint64(0)
    for i in range(BLOCK):
        digest += _digest_row(start + i * ROW * itemsize, where + i, moved[i], itemsize, tables, golden)
    return moved, digest


@compiled()
def add_chunk(
    source: int,
    elements: int,
    first: int,
    layout: Any,
    like: Any,
    placed_at: int,
    record: int,
    scratch: int,
    constants: int,
) -> None:
    """Summarise up to 256 rows, from row `first` on, into one record.

    `placed_at` is the address of the PLACED numbers of a part of a whole; 0 if it is the whole.
    """
    itemsize, code, table = layout
    placed = carray(pointer(placed_at), PLACED, np.int64)
    cut = placed_at != 0 and placed[CUT] != 0
    run = -1
    signs_of = -1
    tables = constants + WEIGHTS + 1024 * (256 - 2 * (128 // itemsize))
    out = carray(pointer(record), FIELDS, np.float64)
    seeds = carray(pointer(constants), 2, np.uint32)
    golden = carray(pointer(constants + 8), 1, np.uint64)[0]
    signs = carray(pointer(scratch + SIGNS), BLOCK * 128, np.uint8)
    sums = carray(pointer(scratch + SUMS), ROW, np.float64)
    few, free = scratch + FEW, scratch + NEXT  # sums of a few rows, and room for these with more rows
    buffer = carray(pointer(scratch + VALUES), ROW, like.dtype)
    ordinary = carray(pointer(scratch + ORDINARY), ROW, like.dtype)
    edge = edge_of(itemsize, code)
    digest = np.uint64(0)
    _clear(out)
    out[MIN], out[MAX] = np.inf, -np.inf
    _clear(sums)
    _clear(carray(pointer(few), ROW, like.dtype))
    last = min(first + CHUNK_ROWS, (elements + ROW - 1) // ROW)
    row, next_fold, careful_until = first, first + _FOLD, first
    while row < last:
        n = min(ROW, elements - row * ROW)
        start = source + row * ROW * itemsize
        copied = n < ROW or start % 8 != 0 or (cut and (row == 0 or (row + 1) * ROW == elements))
        if copied:
            load(start, n * itemsize, ROW * itemsize, scratch + RAW)
            start = scratch + RAW
        where, groups, plan = row, 0, scratch_plan(scratch + GROUPS)
        end = elements  # of the elements that follow in the whole as they do here
        if placed_at != 0:
            where, run, groups, plan = _groups_of_row(placed, row, n, run, itemsize, scratch + GROUPS, seeds, golden)
            end = carray(pointer(placed[RUNS]), (placed[RUNS_COUNT], 2), np.int64)[run + 1, 0]
        if groups == 0 and where >> 2 != signs_of:
            signs_of = where >> 2
            signs_of_row(where, seeds[0], signs)
        whole = groups == 0 and where % BLOCK == 0 and (row + BLOCK) * ROW <= min(end, last * ROW)
        if whole and not copied and row >= careful_until:
            moved, more = _digest_block(start, where, itemsize, seeds[1], tables, golden)
            at = start
            if code != DIRECT:
                at = scratch + VALUES
                for i in range(BLOCK):
                    into = carray(pointer(at + i * ROW * like.itemsize), ROW, like.dtype)
                    convert(code, start + i * ROW * itemsize, table, into)
            ahead = start + BLOCK * ROW * itemsize
            if add_block(like, at, few, free, scratch + SIGNS, moved, ahead, edge, _LARGE, out):
                few, free = free, few
                digest += more
                row += BLOCK
                if row >= next_fold or row == last:
                    _fold(like, few, sums)
                    next_fold = row + _FOLD
                continue
            careful_until = row + _CAREFUL
        moved_one = moved_by(where, seeds[1])
        if groups == 0:
            digest += _digest_row(start, where, moved_one, itemsize, tables, golden)
        at = start
        if code != DIRECT:
            at = scratch + VALUES
            convert(code, start, table, buffer)
        largest, cleaned = add_moments(carray(pointer(at), ROW, like.dtype), n, edge, buffer, ordinary, out)
        if cleaned:
            at = scratch + VALUES
        if largest > _LARGE:
            _fold(like, few, sums)
        if groups != 0:
            digest += add_groups(itemsize, cut, like, start, at, constants + WEIGHTS, few, plan, groups)
        else:
            add_row(like, few, at, scratch + SIGNS + 128 * (where % BLOCK), moved_one)
        row += 1
        if row >= next_fold or row == last or largest > _LARGE:
            _fold(like, few, sums)
            next_fold = row + _FOLD
    carray(pointer(record), FIELDS, np.uint64)[DIGEST] = digest
    sketch = carray(pointer(record + 8 * FIELDS), 256, np.float64)
    _clear(sketch)
    for i in range(ROW):
        sketch[(2 * (i // 8) + 29 * (i % 8)) % 256] += sums[i]


@entry
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
    placed: int,
) -> None:
    """Work on chunks, as numbers of the dtype of `like`, until none is left. Many threads may run it at once.

    `placed` is the address of the PLACED numbers of a part; 0 for a whole tensor.
    """
    chunks = (elements + CHUNK_ROWS * ROW - 1) // (CHUNK_ROWS * ROW)
    layout = (itemsize, code, table)
    while True:
        chunk = take(counter)
        if chunk >= chunks:
            return
        record = records + chunk * RECORD * 8
        add_chunk(source, elements, chunk * CHUNK_ROWS, layout, like, placed, record, scratch, constants)


@entry
def plan_part(elements: int, itemsize: int, placed_at: int, firsts: Any, room: int, constants: int) -> None:
    """Write the plans of all rows of a part one after the other, and the first entry of each row into `firsts`.

    `placed_at` has no address of `firsts` yet. Rows that are rows of the whole have no entries. `room` is scratch
    memory for the plan of one row.
    """
    placed = carray(pointer(placed_at), PLACED, np.int64)
    seeds = carray(pointer(constants), 2, np.uint32)
    golden = carray(pointer(constants + 8), 1, np.uint64)[0]
    run, entries = -1, 0
    for row in range((elements + ROW - 1) // ROW):
        firsts[row] = entries
        n = min(ROW, elements - row * ROW)
        _, run, count, plan = _groups_of_row(placed, row, n, run, itemsize, room, seeds, golden)
        copy_bytes(placed[LISTS] + 4 * entries, plan[0], 4 * count)
        copy_bytes(placed[LISTS + 1] + entries, plan[1], count)
        copy_bytes(placed[LISTS + 2] + entries, plan[2], count)
        if placed[CUT] != 0:
            copy_bytes(placed[LISTS + 3] + entries, plan[3], count)
            copy_bytes(placed[LISTS + 4] + 2 * entries, plan[4], 2 * count)
        entries += count
    firsts[(elements + ROW - 1) // ROW] = entries


@compiled()
def join_chunks(records: int, chunks: int) -> None:
    """Join all chunks in order into the first record."""
    out, integers = carray(pointer(records), RECORD, np.float64), carray(pointer(records), FIELDS, np.uint64)
    for chunk in range(1, chunks):
        more = carray(pointer(records + chunk * RECORD * 8), RECORD, np.float64)
        integers[DIGEST] += carray(pointer(records + chunk * RECORD * 8), FIELDS, np.uint64)[DIGEST]
        if more[COUNT] > 0 or more[EDGE] > 0:
            join(out, more[COUNT], more[MEAN], more[M2], more[MIN], more[MAX])
        for field in (NAN, POSINF, NEGINF, ZEROS, EDGE, L1):
            out[field] += more[field]
        for i in range(FIELDS, RECORD):
            out[i] += more[i]


@entry
def finish(records: int, chunks: int, sketch: Any) -> None:
    """Join all chunks into the first record, and copy its sketch into `sketch`."""
    join_chunks(records, chunks)
    out = carray(pointer(records), RECORD, np.float64)
    for i in range(256):
        sketch[i] = out[FIELDS + i]


WORK = 11
"""Arguments of a member of the team in 8-byte fields: those of `run` except `like` and `scratch`, then the scratch
memory of all members and the counter of members."""


@compiled()
def _member(work: Any, like: Any) -> None:
    scratch = work[9] + take(work[10]) * SCRATCH
    run(work[0], work[1], work[2], work[3], work[4], like, work[5], work[6], scratch, work[7], work[8])


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
