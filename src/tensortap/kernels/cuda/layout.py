"""Memory layouts: where the kernel finds a tensor's elements in C order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["FLAT", "MOST_DIMS", "Layout", "lay_out"]

MOST_DIMS = 6
"""Maximum number of dimensions that a kernel supports."""


class Layout(NamedTuple):
    """A memory layout. Code 0: contiguous; 1: whole groups of eight at strides; 2: single elements at strides."""

    code: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Innermost first, in elements."""


FLAT = Layout(0, (), ())
"""The contiguous layout."""


def lay_out(shape: Sequence[int], strides: Sequence[int], itemsize: int, address: int) -> Layout | None:
    """Return the simplest layout that fits a tensor; None if the tensor must be copied first.

    >>> lay_out((4, 8), (8, 1), 2, 256)
    Layout(code=0, sizes=(), strides=())
    >>> lay_out((2, 4, 8), (8, 16, 1), 2, 256)
    Layout(code=1, sizes=(1, 4, 2), strides=(8, 16, 8))
    """
    sizes, steps = _collapse(shape, strides)
    if len(sizes) > MOST_DIMS or max(sizes, default=0) >= 1 << 32:
        contiguous = len(sizes) == 1 and steps[0] == 1 and address % min(16, 8 * itemsize) == 0
        return FLAT if contiguous else None
    aligned = address % min(16, 8 * itemsize) == 0
    if not sizes or (len(sizes) == 1 and steps[0] == 1):
        if aligned:
            return FLAT
        return Layout(2, (math.prod(shape),), (1,))
    if aligned and steps[0] == 1 and sizes[0] % 8 == 0 and all(step % 8 == 0 for step in steps[1:]):
        return Layout(1, (sizes[0] // 8, *sizes[1:]), (8, *steps[1:]))
    return Layout(2, tuple(sizes), tuple(steps))


def _collapse(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return sizes and strides, innermost first, with adjacent dimensions merged and dimensions of size 1 removed."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if sizes and step == steps[-1] * sizes[-1]:
            sizes[-1] *= size
        else:
            sizes.append(size)
            steps.append(step)
    return sizes, steps
