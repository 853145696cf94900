"""The plan of a row of a part: its groups of the whole, and the numbers that the definition derives from their
positions.

A group of the whole has eight elements; a part may have all or some of them. A plan lists, for each group: the hash of
its line of the digest, its slot, the signs of its elements, which elements the part has, and where in the row of the
part the group would begin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from tensortap.kernels.jit import compiled
from tensortap.kernels.summary.elements import ROW
from tensortap.kernels.summary.groups import BLOCK, list_groups
from tensortap.kernels.summary.positions import line_hash, moved_by, sign_key
from tensortap.kernels.vectors import pointer

__all__ = ["PLAN_LISTS", "PLAN_ROOM", "find_run", "plan_row", "scratch_plan", "whole_row"]

PLAN_LISTS = (4, 1, 1, 1, 2)
"""Bytes of an entry in each list of a plan: hashes, slots, signs, masks, places."""
_ROOM = ROW + 4 * BLOCK
PLAN_ROOM = sum(PLAN_LISTS) * _ROOM
"""Bytes for the plan of one row."""


@compiled()
def scratch_plan(room: int) -> Any:
    """Return the addresses of the lists of one row's plan in scratch memory. A row has 1024 groups at most."""
    return room, room + 4 * _ROOM, room + 5 * _ROOM, room + 6 * _ROOM, room + 7 * _ROOM


@compiled()
def whole_row(runs: Any, run: int, row: int) -> int:
    """Return the row of the whole that a row of the part is; -1 if it is none. `run` has its first element."""
    pos = runs[run, 1] + row * ROW - runs[run, 0]
    return pos >> 10 if pos & (ROW - 1) == 0 and runs[run + 1, 0] >= (row + 1) * ROW else -1


@compiled()
def plan_row(begin: int, n: int, runs: Any, run: int, itemsize: int, seeds: Any, golden: Any, plan: Any) -> Any:
    """List the groups of `n` elements of the part from element `begin` on, which is in run `run`.

    Return their number, and the run of the last element. Short rows of the part often share a row of the whole: its
    hashes are kept from one piece to the next.
    """
    hashes_at, masks_at = plan[0], plan[3]
    bits = 7  # log2 of the groups in a line
    while (1 << (7 - bits)) < itemsize:
        bits -= 1
    count, at, end, known = 0, begin, begin + n, np.int64(-1)
    moved, signs = np.int64(0), (np.uint32(0), np.uint32(0), np.uint32(0))
    while at < end:
        while runs[run + 1, 0] <= at:
            run += 1
        pos = runs[run, 1] + at - runs[run, 0]
        row, inside = pos >> 10, pos & (ROW - 1)
        some = min(min(end, runs[run + 1, 0]) - at, ROW - inside)
        g, before = inside >> 3, inside & 7
        groups = (before + some + 7) >> 3
        if row != known:
            known = row
            moved = moved_by(row, seeds[1])
            signs = sign_key(row, seeds[0])
        place = at - begin - before
        for first in range(0, groups, BLOCK):
            list_groups(plan, count + first, g + first, moved, place + 8 * first, signs)
        ends = carray(pointer(masks_at + count), groups, np.uint8)
        ends[0] = 255 << before
        ends[groups - 1] &= 255 >> (-(before + some) & 7)
        _hash_lines(hashes_at + 4 * count, g, groups, moved, bits, row * itemsize, golden)
        count += groups
        at += some
    return count, run


@compiled()
def _hash_lines(at: int, g: int, groups: int, moved: int, bits: int, line: int, golden: Any) -> None:
    """List the hashes of the lines of neighbouring groups of one row of the whole, whose first line is `line`."""
    i = 0
    while i < groups:
        here = (g + i) >> bits
        end = min(groups, ((here + 1) << bits) - g)
        value = np.uint32(line_hash(np.uint64(line + (here ^ (moved >> bits))), golden))
        for first in range(i, end, BLOCK):
            hashes = carray(pointer(at + 4 * first), BLOCK, np.uint32)
            for j in range(BLOCK):
                hashes[j] = value
        i = end


@compiled()
def find_run(runs: Any, element: int) -> int:
    """Return the run that has an element of the part."""
    low, high = 0, runs.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if runs[middle, 0] <= element:
            low = middle
        else:
            high = middle
    return low
