"""Rows of a part of a tensor, digested and added to the sketch at their positions in the whole.

A piece is what is neighbours in the part, and in one row of 1024 elements of the whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from tensortap.kernels.jit import compiled
from tensortap.kernels.summary.elements import ROW
from tensortap.kernels.summary.positions import WEIGHTS, digest_line, line_hash, mix, signs_of_row
from tensortap.kernels.summary.scratch import FEW, LISTS, ORDINARY, PIECE, PIECE_VALUES, SIGNS
from tensortap.kernels.vectors import add_signed, add_some_signed, copy_bytes, pointer

__all__ = ["add_pieces", "find_run"]

_MANY_GROUPS = 48
"""Groups of a piece from which on the signs of its whole row are computed: pieces of the next rows share them."""
_PIECES = 512
"""Pieces whose hashes are computed together."""


@compiled()
def _piece_digest(raw: int, word: int, count: int, line: Any, moved: int, bits: int, golden: Any, tables: int) -> Any:
    """Return the digest of neighbouring words of one row of the whole, from word `word` of that row on.

    `line` is the number of the row's first line, and `bits` log2 of the groups in a line: divisions would take most of
    the time of a short piece. `tables` has the weights for each order of a line's groups.
    """
    weights = tables + (moved & ((1 << bits) - 1)) * 1024
    digest = np.uint64(0)
    while count > 0:
        place = word & 255
        some = min(256 - place, count)
        total = np.uint64(0)
        if some == 256:
            total = digest_line(carray(pointer(raw), 256, np.uint32), carray(pointer(weights), 256, np.uint32))
        else:
            words = carray(pointer(raw), some, np.uint32)
            weight = carray(pointer(weights + 4 * place), some, np.uint32)
            for i in range(some):
                total += np.uint64(words[i]) * np.uint64(weight[i])
        digest += total * line_hash(line + np.uint64((word >> 8) ^ (moved >> bits)), golden)
        raw += 4 * some
        word += some
        count -= some
    return digest


@compiled()
def _piece_sketch(like: Any, few: int, values: int, g: int, groups: int, row: int, moved: int, signs: Any) -> None:
    """Add neighbouring groups of one row of the whole to the sums. `signs` are those of the groups, in their order."""
    size = 8 * like.itemsize
    shift = np.uint32(8 * (row & 3))
    for i in range(groups):
        slot = (g + i) ^ moved
        add_signed(like, few + slot * size, values + i * size, np.uint32(signs[i] >> shift))


@compiled()
def _piece_of_row(like: Any, few: int, values: int, g: int, groups: int, row: int, moved: int, signs: Any) -> None:
    """The same, with the signs of all slots of the row."""
    size = 8 * like.itemsize
    shift = np.uint32(8 * (row & 3))
    for i in range(groups):
        slot = (g + i) ^ moved
        add_signed(like, few + slot * size, values + i * size, np.uint32(signs[slot] >> shift))


@compiled()
def _ragged_sketch(
    like: Any, few: int, values: int, place: int, count: int, row: int, moved: int, signs: Any, of_row: bool
) -> None:
    """Add neighbouring elements of one row of the whole, from element `place` of that row on, to the sums.

    `signs` are those of all slots of the row, or of the piece's groups in their order. Memory around the elements is
    read, up to whole groups.
    """
    size = 8 * like.itemsize
    bits = np.uint32(8 * (row & 3))
    g, before = place >> 3, place & 7
    end = before + count
    start = values - before * like.itemsize  # where the first group would begin
    first, last = (before + 7) >> 3, end >> 3
    if before != 0:
        slot = g ^ moved
        sign = np.uint32(signs[slot if of_row else 0] >> bits)
        add_some_signed(like, few + slot * size, start, sign, before, min(8, end))
    if of_row:
        for i in range(first, last):
            slot = (g + i) ^ moved
            add_signed(like, few + slot * size, start + i * size, np.uint32(signs[slot] >> bits))
    else:
        for i in range(first, last):
            slot = (g + i) ^ moved
            add_signed(like, few + slot * size, start + i * size, np.uint32(signs[i] >> bits))
    if end & 7 != 0 and last >= first:
        slot = (g + last) ^ moved
        sign = np.uint32(signs[slot if of_row else last] >> bits)
        add_some_signed(like, few + slot * size, start + last * size, sign, 0, end & 7)


@compiled()
def _piece_signs(row: int, g: int, groups: int, moved: int, seed: Any, out: Any) -> None:
    """Compute the sign bits of neighbouring groups of one row of the whole."""
    first = np.uint64(row >> 2) * np.uint64(128)
    key = np.uint32(mix(np.uint32(first >> np.uint64(32))) ^ np.uint32(seed))
    low = np.uint32(first)
    for i in range(groups):
        out[i] = mix(np.uint32(np.uint32(low + np.uint32((g + i) ^ moved)) ^ key))


@compiled()
def _shifted(source: int, count: int, shift: int, width: int, groups: int, target: int) -> int:
    """Copy elements into zeros, `shift` elements from the start of whole groups, and return where the groups are."""
    into = carray(pointer(target), groups * width, np.uint64)  # a group has 8 elements
    for i in range(width):
        into[i] = 0
        into[(groups - 1) * width + i] = 0
    copy_bytes(target + shift * width, source, count * width)
    return target


@compiled()
def add_pieces(
    raw: int,
    values: int,
    bounds: Any,
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
    the whole whose signs are in the scratch memory. `bounds` are those of the memory that has the values. Return the
    digest, the last run, and the new `signs_of`.
    """
    low, high = bounds
    seeds = carray(pointer(constants), 2, np.uint32)
    golden = carray(pointer(constants + 8), 1, np.uint64)[0]
    signs = carray(pointer(scratch + SIGNS), 128, np.uint32)
    full_signs = carray(pointer(scratch + SIGNS + 1024), 128, np.uint32)
    bits = 7
    while (1 << (7 - bits)) < itemsize:
        bits -= 1
    tables = constants + WEIGHTS + 1024 * (256 - 2 * (1 << bits))
    few, room = scratch + FEW, scratch + PIECE_VALUES
    places = carray(pointer(scratch + ORDINARY), _PIECES, np.int64)
    begins = carray(pointer(scratch + ORDINARY + 8 * _PIECES), _PIECES + 1, np.int32)
    strides = carray(pointer(scratch + LISTS), _PIECES, np.int64)
    moves = carray(pointer(scratch + LISTS + 8 * _PIECES), _PIECES, np.uint32)
    digest = np.uint64(0)
    at, end = begin, begin + n
    while at < end:
        # The hashes of many pieces at once: one after the other, each would wait for the one before.
        pieces = 0
        upper = np.int64(-1)
        while at < end and pieces < _PIECES:
            while runs[run + 1, 0] <= at:
                run += 1
            pos = runs[run, 1] + at - runs[run, 0]
            if pieces == 0:
                upper = pos >> 42
            elif pos >> 42 != upper:
                break
            places[pieces], begins[pieces] = pos, at - begin
            strides[pieces] = runs[run + 1, 1] - runs[run, 1]
            at += min(min(end, runs[run + 1, 0]) - at, ROW - (pos & (ROW - 1)))
            pieces += 1
        begins[pieces] = at - begin
        key = np.uint32(mix(np.uint32(upper)) ^ np.uint32(seeds[1]))
        for i in range(pieces):
            moves[i] = mix(np.uint32(np.uint32(places[i] >> 10) ^ key)) & np.uint32(127)
        for i in range(pieces):
            pos, moved, start, count = places[i], np.int64(moves[i]), begins[i], begins[i + 1] - begins[i]
            inside = pos & (ROW - 1)
            row, g, shift = pos >> 10, inside >> 3, inside & 7
            groups = (shift + count + 7) >> 3
            source, numbers = raw + start * itemsize, values + start * like.itemsize
            line = np.uint64(row * itemsize)
            if (source | inside * itemsize | count * itemsize) & 3 != 0:  # not whole words
                source = _shifted(source, count, shift, itemsize, groups, scratch + PIECE)
                word, words = 2 * g * itemsize, 2 * groups * itemsize
            else:
                word, words = inside * itemsize >> 2, count * itemsize >> 2
            digest += _piece_digest(source, word, words, line, moved, bits, golden, tables)
            # The signs of all slots serve four rows: compute them if these have many groups here, in one piece or more.
            many = groups >= _MANY_GROUPS or (strides[i] > 0 and _MANY_GROUPS * strides[i] <= groups * 4 * ROW)
            if many and row >> 2 != signs_of:
                signs_of = row >> 2
                signs_of_row(row, seeds[0], full_signs)
            if row >> 2 != signs_of:
                _piece_signs(row, g, groups, moved, seeds[0], signs)
            if (shift | count) & 7 != 0:
                around = numbers - shift * like.itemsize
                if around < low or around + groups * 8 * like.itemsize > high:
                    numbers = _shifted(numbers, count, shift, like.itemsize, groups, room) + shift * like.itemsize
                if row >> 2 == signs_of:
                    _ragged_sketch(like, few, numbers, inside, count, row, moved, full_signs, True)
                else:
                    _ragged_sketch(like, few, numbers, inside, count, row, moved, signs, False)
            elif row >> 2 == signs_of:
                _piece_of_row(like, few, numbers, g, groups, row, moved, full_signs)
            else:
                _piece_sketch(like, few, numbers, g, groups, row, moved, signs)
    return digest, run, signs_of


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
