"""Boxes in a whole tensor: whether they cover it once, and the blocks of a range of flat positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tensortap.core.placement import Placement

__all__ = ["Covering", "Extent", "Region", "blocks_of_range", "cover", "overlap", "region_of"]

Extent = tuple[tuple[int, int], ...]
"""A block of the whole: offset and length along each dimension."""
Region = tuple[Extent, ...]
"""All blocks that one process holds, sorted."""


@dataclass(frozen=True)
class Covering:
    """How several regions cover a whole."""

    elements: int
    missing: int = 0
    """Elements that no region holds."""
    doubled: int = 0
    """Elements that several regions hold."""
    gap: Extent | None = None
    """The first block that no region holds."""
    overlap: Extent | None = None
    """The first block that several regions hold."""

    @property
    def once(self) -> bool:
        return not (self.missing or self.doubled)


def region_of(placement: Placement) -> tuple[tuple[int, ...], Region]:
    """Return the whole's shape and the blocks in it. Flat spans are blocks of the flattened whole.

    >>> region_of(Placement((4, 6), (((0, 2, 2), (0, 0, 6)),)))
    ((4, 6), (((2, 2), (0, 6)),))
    """
    shape = (prod(placement.shape),) if placement.flat else placement.shape
    blocks = (tuple((offset, length) for _, offset, length in box) for box in placement.boxes)
    return shape, tuple(sorted(block for block in blocks if all(length for _, length in block)))


def cover(shape: tuple[int, ...], regions: Sequence[Region]) -> Covering:
    """Return how regions cover a whole. Each counts once, also if it is there several times.

    The whole is cut at every edge of a block, and the blocks over each cell are counted: a few thousand cells, however
    large the tensor is.

    >>> cover((4, 6), [(((0, 2), (0, 6)),), (((2, 1), (0, 6)),)]).gap
    ((3, 1), (0, 6))
    """
    blocks = [block for region in regions for block in region]
    cuts = [
        np.unique([0, size, *(edge for block in blocks for edge in (block[at][0], sum(block[at])))])
        for at, size in enumerate(shape)
    ]
    counts = np.zeros([max(0, len(each) - 1) for each in cuts], np.int64)
    for block in blocks:
        counts[tuple(_cells(edges, *span) for edges, span in zip(cuts, block, strict=True))] += 1
    sizes = np.ones(counts.shape, np.int64)
    for at, edges in enumerate(cuts):
        along = np.diff(edges)
        sizes *= along.reshape([-1 if axis == at else 1 for axis in range(len(cuts))])

    def first(found: np.ndarray) -> Extent | None:
        places = np.argwhere(found)
        if not len(places):
            return None
        return tuple((int(cuts[at][cell]), int(np.diff(cuts[at])[cell])) for at, cell in enumerate(places[0]))

    gaps, twice = counts == 0, counts > 1
    return Covering(
        prod(shape), int(sizes[gaps].sum()), int(sizes[twice].sum()), first(gaps & (sizes > 0)), first(twice)
    )


def _cells(edges: np.ndarray, offset: int, length: int) -> slice:
    begin, end = np.searchsorted(edges, (offset, offset + length))
    return slice(int(begin), int(end))


def overlap(one: Extent, other: Extent) -> Extent | None:
    """Return the block that two blocks have in common; None if there is none.

    >>> overlap(((0, 4), (0, 2)), ((3, 4), (1, 5)))
    ((3, 1), (1, 1))
    """
    found = []
    for (begin, length), (other_begin, other_length) in zip(one, other, strict=True):
        first, last = max(begin, other_begin), min(begin + length, other_begin + other_length)
        if first >= last:
            return None
        found.append((first, last - first))
    return tuple(found)


def blocks_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Extent]:
    """Yield blocks that make up a range of flat positions in C order, in order: at most two for each dimension.

    >>> list(blocks_of_range((4, 6), 4, 20))
    [((0, 1), (4, 2)), ((1, 2), (0, 6)), ((3, 1), (0, 2))]
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    first, begin = divmod(start, inner)
    last, end = divmod(stop, inner)
    if first == last:
        for block in blocks_of_range(shape[1:], begin, end):
            yield ((first, 1), *block)
        return
    if begin:
        for block in blocks_of_range(shape[1:], begin, inner):
            yield ((first, 1), *block)
        first += 1
    if first < last:
        yield ((first, last - first), *((0, size) for size in shape[1:]))
    for block in blocks_of_range(shape[1:], 0, end):
        yield ((last, 1), *block)
