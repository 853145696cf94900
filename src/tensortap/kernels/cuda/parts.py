"""Parts of a whole: where the kernel finds the elements of a placement's boxes, and their positions in the whole.

A box consists of runs: elements that are neighbours in memory and in the whole. The kernel visits the rows of the whole
that a run touches, so that digest and sketch need no other code. A part that is one run from the beginning of a row on
is read like a whole tensor, with another number of its first row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tensortap.core.placement import Box, Placement
from tensortap.kernels.cuda.layout import MOST_DIMS
from tensortap.kernels.summary.reference import ROW, check_placement

__all__ = ["Part", "Runs", "part_of"]

_TOGETHER = 4 * ROW
"""Elements of four rows, whose signs come from one hash."""
_MOST_BOXES = 64
"""Boxes that are worth a launch each."""
_MOST_ROWS = 1 << 22
"""Rows of the kernel's own numbering, which are 32-bit numbers of elements / 1024."""


class Runs(NamedTuple):
    """The runs of one box. Dimensions are innermost first; numbers are of elements."""

    offset: int
    """The first element in memory."""
    position: int
    """The position of that element in the whole."""
    length: int
    """Elements of each run."""
    sizes: tuple[int, ...]
    """The number of runs along each dimension."""
    strides: tuple[int, ...]
    """Strides from one run to the next in memory."""
    steps: tuple[int, ...]
    """Strides from one run to the next in the whole."""
    rows_each: int
    """Rows of the whole that a run may touch."""

    @property
    def rows(self) -> int:
        return math.prod(self.sizes) * self.rows_each


class Part(NamedTuple):
    """A local tensor, contiguous in memory, that is part of a whole."""

    elements: int
    """Elements in the boxes."""
    stored: int
    """Elements in memory."""
    base: int
    """The first row in the whole of a part that is one run from there on; else -1."""
    boxes: tuple[Runs, ...]
    """All boxes that are not empty."""


@lru_cache(maxsize=4096)
def part_of(placement: Placement, shape: tuple[int, ...], components: int) -> Part | None:
    """Return the part that describes a local tensor of this shape, in the whole's order of dimensions; None if no
    kernel can read it.

    A complex element has two components.

    >>> rows = Placement.of_block((64, 1024), (16, 0), (8, 1024))
    >>> part_of(rows, (8, 1024), 1).base
    16
    """
    flat = placement.flat
    check_placement(shape, placement if flat or not placement.order else _in_order(placement))
    whole = (math.prod(placement.shape),) if flat else placement.shape
    local = (math.prod(shape),) if flat else shape
    boxes = [box for box in placement.boxes if all(length for _, _, length in box)]
    if components > 1:
        whole, local = (*whole, components), (*local, components)
        boxes = [(*box, (0, 0, components)) for box in boxes]
    found = tuple(_runs(box, whole, local) for box in boxes)
    stored = math.prod(local)
    elements = sum(runs.length * math.prod(runs.sizes) for runs in found)
    if len(found) == 1 and not found[0].sizes and not found[0].offset and found[0].position % _TOGETHER == 0:
        return Part(elements, stored, found[0].position // ROW, ())
    if len(found) > _MOST_BOXES:
        return None
    if any(len(runs.sizes) > MOST_DIMS or runs.rows >= _MOST_ROWS * ROW for runs in found):
        return None
    return Part(elements, stored, -1, found)


def _in_order(placement: Placement) -> Placement:
    """Return the placement of the tensor whose dimensions are in the whole's order."""
    return Placement(placement.shape, placement.boxes, placement.axes, placement.source)


def _runs(box: Box, whole: Sequence[int], local: Sequence[int]) -> Runs:
    inner, length = len(box), 1
    while inner:
        inner -= 1
        size = box[inner][2]
        length *= size
        if size != whole[inner] or size != local[inner]:
            break
    sizes: list[int] = []
    strides: list[int] = []
    steps: list[int] = []
    for at in range(inner - 1, -1, -1):
        size, stride, step = box[at][2], math.prod(local[at + 1 :]), math.prod(whole[at + 1 :])
        if size == 1:
            continue
        if sizes and stride == strides[-1] * sizes[-1] and step == steps[-1] * sizes[-1]:
            sizes[-1] *= size
        else:
            sizes.append(size)
            strides.append(stride)
            steps.append(step)
    offset = sum(start * math.prod(local[at + 1 :]) for at, (start, _, _) in enumerate(box))
    position = sum(first * math.prod(whole[at + 1 :]) for at, (_, first, _) in enumerate(box))
    at_row = position % ROW == 0 and all(step % ROW == 0 for step in steps)
    rows = -(-length // ROW) if at_row else (length + ROW - 2) // ROW + 1
    return Runs(offset, position, length, tuple(sizes), tuple(strides), tuple(steps), rows)
