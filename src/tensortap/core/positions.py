"""Positions of a local dimension in the whole: how an axis divides it, and the spans that result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from tensortap.core.placement import Placement, Span

__all__ = ["MODES", "Division", "Positions", "divide", "from_positions", "spans_of"]

Positions = npt.NDArray[np.int64]
"""For each local index, the index in the whole; negative for padding."""

MODES = ("block", "zigzag", "strided")
"""block: one range for each process. zigzag: twice as many ranges, the i-th from either end, as context parallelism
balances causal attention. strided: every n-th index, as a distributed sampler deals samples."""


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a dimension by one mesh axis."""

    count: int
    index: int
    mode: str = "block"

    def take(self, whole: Positions) -> Positions:
        """Return the part of this process. Raise ValueError if the dimension cannot be divided evenly."""
        parts = 2 * self.count if self.mode == "zigzag" else self.count
        if len(whole) % parts:
            raise ValueError(f"{len(whole)} cannot be divided into {parts} equal parts ({self.mode})")
        if self.mode == "strided":
            return whole[self.index :: self.count]
        pieces: Positions = whole.reshape(parts, -1)
        if self.mode == "zigzag":
            return np.concatenate([pieces[self.index], pieces[parts - 1 - self.index]])
        own: Positions = pieces[self.index]
        return own


def divide(local: int, divisions: Sequence[Division]) -> tuple[int, Positions]:
    """Return the size of the whole dimension, and the positions of a local one. The first division is the outermost."""
    size = local
    for division in divisions:
        size *= division.count
    positions = np.arange(size)
    for division in divisions:
        positions = division.take(positions)
    return size, positions


def spans_of(positions: Positions) -> tuple[Span, ...]:
    """Return consecutive positions as spans; padding belongs to none.

    >>> spans_of(np.array([0, 1, 6, 7, -1]))
    ((0, 0, 2), (2, 6, 2))
    """
    if not positions.size:
        return ((0, 0, 0),)
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    starts = np.concatenate([[0], breaks])
    ends = np.concatenate([breaks, [positions.size]])
    return tuple(
        (int(start), int(positions[start]), int(end - start))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        if positions[start] >= 0
    )


def from_positions(
    shape: Sequence[int],
    positions: Sequence[Positions | None],
    axes: Mapping[str, str],
    source: str,
    order: Sequence[int] = (),
) -> Placement:
    """Return the placement of a tensor by the positions of each of its dimensions, in the order of the whole.

    None stands for a dimension that is whole.
    """
    spans = [
        ((0, 0, size),) if along is None else spans_of(along) for size, along in zip(shape, positions, strict=True)
    ]
    return Placement(tuple(shape), tuple(product(*spans)), dict(axes), source, tuple(order))
