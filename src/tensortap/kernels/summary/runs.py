"""Placements as the fast kernels read them: runs of elements that are neighbours in the part and in the whole."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core.placement import Placement
from tensortap.kernels.summary.reference import check_placement

__all__ = ["PlacedRuns", "is_entire", "placed_array", "runs_of"]


class PlacedRuns(NamedTuple):
    """Rows of two numbers: the first element of a run in the part, and its position in the whole; then the end."""

    table: npt.NDArray[np.int64]
    moves: bool
    """Whether any element has another position in the whole than in the part."""


def placed_array(array: npt.NDArray[Any], placement: Placement) -> npt.NDArray[Any]:
    """Return the elements in the boxes, box after box, in C order; without a copy if the boxes have all elements."""
    chosen = _all_in_one(array.shape, placement)
    local = array.reshape(-1) if placement.flat else array
    if placement.order:
        local = local.transpose(placement.order)
    if chosen is not None:
        return local[chosen]
    boxes = [box for box in placement.boxes if all(length for _, _, length in box)]
    pieces = [local[tuple(slice(start, start + length) for start, _, length in box)] for box in boxes]
    return (
        pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, array.dtype), *(p.reshape(-1) for p in pieces)])
    )


def is_entire(shape: tuple[int, ...], placement: Placement) -> bool:
    """Return whether the boxes have all elements of a local tensor in its own order, so that `placed_array` is it."""
    chosen = _all_in_one(shape, placement)
    sizes = (math.prod(shape),) if placement.flat else shape
    return not placement.order and chosen is not None and tuple(each.stop for each in chosen) == sizes


@lru_cache(maxsize=512)
def _all_in_one(shape: tuple[int, ...], placement: Placement) -> tuple[slice, ...] | None:
    """Check a placement, and return the elements in its boxes as one block; None if they are not one.

    Many boxes take longer to check than a small tensor to summarise, and a training repeats them at every step.
    """
    check_placement(shape, placement)
    boxes = [box for box in placement.boxes if all(length for _, _, length in box)]
    extent = _extent(boxes)
    return tuple(slice(0, size) for size in extent) if _tiles(extent, boxes) else None  # beyond it is padding


@lru_cache(maxsize=512)
def runs_of(placement: Placement, components: int) -> PlacedRuns:
    """Return the runs of `placed_array`, counted in components: a complex element has two."""
    boxes = [box for box in placement.boxes if all(length for _, _, length in box)]
    whole = (math.prod(placement.shape),) if placement.flat else placement.shape
    local = _extent(boxes)
    tiled = _tiles(local, boxes)
    starts, positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    before = 0
    for box in boxes:
        lengths = [length for _, _, length in box]
        inner = _contiguous(lengths, whole, local if tiled else lengths)
        outer = np.zeros(1, np.int64)
        begin = np.zeros(1, np.int64)
        sizes = local if tiled else tuple(lengths)
        for at in range(len(box) - inner):
            start, offset, length = box[at]
            outer = (outer[:, None] + (offset + np.arange(length)) * math.prod(whole[at + 1 :])).reshape(-1)
            first = (start if tiled else 0) + np.arange(length)
            begin = (begin[:, None] + first * math.prod(sizes[at + 1 :])).reshape(-1)
        for at in range(len(box) - inner, len(box)):
            start, offset, _ = box[at]
            outer = outer + offset * math.prod(whole[at + 1 :])
            begin = begin + (start if tiled else 0) * math.prod(sizes[at + 1 :])
        starts.append(begin + before)
        positions.append(outer)
        before += 0 if tiled else math.prod(lengths)
    return _table(
        np.concatenate(starts), np.concatenate(positions), sum(math.prod(n for _, _, n in b) for b in boxes), components
    )


def _table(
    starts: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], elements: int, components: int
) -> PlacedRuns:
    order = np.argsort(starts, kind="stable")
    starts, positions = starts[order], positions[order]
    if starts.size:  # neighbours in both orders are one run
        new = np.concatenate([[True], np.diff(positions) != np.diff(starts)])
        starts, positions = starts[new], positions[new]
    table = np.empty((starts.size + 1, 2), np.int64)
    table[:-1, 0], table[:-1, 1] = starts, positions
    table[-1] = elements, 0
    moves = bool(np.any(table[:-1, 0] != table[:-1, 1]))
    return PlacedRuns(np.ascontiguousarray(table * components), moves)


def _contiguous(lengths: list[int], whole: tuple[int, ...], local: Any) -> int:
    """Return the number of last dimensions that form one run: all but the first of them are entire on both sides."""
    count = 0
    for at in range(len(lengths) - 1, -1, -1):
        count += 1
        if lengths[at] != whole[at] or lengths[at] != local[at]:
            break
    return count


def _extent(boxes: list[Any]) -> tuple[int, ...]:
    """Return the smallest local shape that has all boxes."""
    if not boxes:
        return ()
    return tuple(max(start + length for start, _, length in spans) for spans in zip(*boxes, strict=True))


def _tiles(shape: tuple[int, ...], boxes: list[Any]) -> bool:
    """Return whether the boxes, which do not overlap, are all of a tensor of this shape."""
    return bool(boxes) and math.prod(shape) == sum(math.prod(n for _, _, n in box) for box in boxes)
