"""Boxes in a whole: coverings, blocks of ranges, and bytes that are read once."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import pytest

from tensortap.compare.join.bands import Assembly, Piece, read_range
from tensortap.compare.join.geometry import blocks_of_range, cover, region_of
from tensortap.core.placement import Box, Placement
from tensortap.store.source import Bytes


class CountedBytes(Bytes):
    """Objects in memory that count what is read of them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.read_bytes = 0

    def size(self, name: str) -> int:
        return len(self.objects[name])

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self.read_bytes += len(target)
        target[:] = self.objects[name][offset : offset + len(target)]


def pieces(files: CountedBytes, whole: np.ndarray, boxes: Sequence[Sequence[Box]]) -> tuple[Piece, ...]:
    """Store parts of a whole as ranks do: all boxes of a rank side by side along the first dimension that they cut."""
    found = []
    for number, own in enumerate(boxes):
        shape = tuple(max(span[0] + span[2] for span in spans) for spans in zip(*own, strict=True))
        local = np.zeros(shape, whole.dtype)
        for box in own:
            inside = tuple(slice(start, start + length) for start, _, length in box)
            local[inside] = whole[tuple(slice(at, at + length) for _, at, length in box)]
        files.objects[str(number)] = local.tobytes()
        found.append(Piece(str(number), 0, shape, tuple(own)))
    return tuple(found)


ROWS = [[((0, 0, 3), (0, 0, 10))], [((0, 3, 4), (0, 0, 10))]]
COLUMNS = [[((0, 0, 7), (0, 0, 4))], [((0, 0, 7), (0, 4, 6))]]
GRID = [[((0, a, m), (0, b, n))] for a, m in ((0, 3), (3, 4)) for b, n in ((0, 4), (4, 6))]
ZIGZAG = [[((0, 0, 2), (0, 0, 10)), ((2, 6, 1), (0, 0, 10))], [((0, 2, 4), (0, 0, 10))]]


@pytest.mark.parametrize("boxes", [ROWS, COLUMNS, GRID, ZIGZAG], ids=["rows", "columns", "grid", "zigzag"])
@pytest.mark.parametrize("step", [1, 7, 10, 64])
def test_ranges_of_pieces_are_those_of_the_whole(boxes: Sequence[Sequence[Box]], step: int) -> None:
    files, whole = CountedBytes(), np.arange(70, dtype=np.float32).reshape(7, 10)
    assembly = Assembly(whole.shape, (pieces(files, whole, boxes),))
    found = [read_range(files, assembly, "float32", at, min(at + step, 70)) for at in range(0, 70, step)]
    np.testing.assert_array_equal(np.concatenate(found), whole.reshape(-1))


def test_every_byte_is_read_once() -> None:
    files, whole = CountedBytes(), np.arange(7 * 64, dtype=np.float32).reshape(1, 7, 64)
    boxes: list[list[Box]] = [[((0, 0, 1), (0, 0, 7), (0, at, 16))] for at in range(0, 64, 16)]
    assembly = Assembly(whole.shape, (pieces(files, whole, boxes),))
    for at in range(0, whole.size, 64):
        read_range(files, assembly, "float32", at, at + 64)
    assert files.read_bytes == whole.nbytes


def test_summands_are_added_and_weighted() -> None:
    files, whole = CountedBytes(), np.arange(12, dtype=np.float32).reshape(3, 4)
    one = pieces(files, whole, [[((0, 0, 3), (0, 0, 4))]])
    found = read_range(files, Assembly(whole.shape, (one, one, one), 0.5), "float32", 0, 12)
    np.testing.assert_array_equal(found, 1.5 * whole.reshape(-1))


def test_dimensions_in_another_order() -> None:
    files, whole = CountedBytes(), np.arange(24, dtype=np.int64).reshape(2, 3, 4)
    local = np.ascontiguousarray(whole.transpose(1, 0, 2))
    files.objects["a"] = local.tobytes()
    box = ((0, 0, 2), (0, 0, 3), (0, 0, 4))
    assembly = Assembly(whole.shape, ((Piece("a", 0, local.shape, (box,), (1, 0, 2)),),))
    np.testing.assert_array_equal(read_range(files, assembly, "int64", 5, 20), whole.reshape(-1)[5:20])


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (1, 1, 6)])
def test_blocks_make_up_every_range(shape: tuple[int, ...]) -> None:
    whole = np.arange(prod(shape)).reshape(shape)
    for start in range(whole.size + 1):
        for stop in range(start, whole.size + 1):
            blocks = blocks_of_range(shape, start, stop)
            parts = [whole[tuple(slice(at, at + n) for at, n in block)].reshape(-1) for block in blocks]
            assert np.concatenate([np.empty(0, int), *parts]).tolist() == list(range(start, stop))


def test_gaps_and_overlaps_are_counted_and_located() -> None:
    whole = cover((4, 6), [(((0, 2), (0, 6)),), (((2, 2), (0, 6)),)])
    assert whole.once and (whole.missing, whole.doubled) == (0, 0)
    gap = cover((4, 6), [(((0, 2), (0, 6)),), (((2, 2), (0, 4)),)])
    assert (gap.missing, gap.doubled, gap.gap) == (4, 0, ((2, 2), (4, 2)))
    twice = cover((4, 6), [(((0, 3), (0, 6)),), (((2, 2), (0, 6)),)])
    assert (twice.missing, twice.doubled, twice.overlap) == (0, 6, ((2, 1), (0, 6)))


def test_flat_ranges_are_regions_of_the_flattened_whole() -> None:
    halves = [Placement((3, 5), (((0, at, n),),)) for at, n in ((0, 8), (8, 7))]
    shape, first = region_of(halves[0])
    assert shape == (15,) and cover(shape, [first, region_of(halves[1])[1]]).once
