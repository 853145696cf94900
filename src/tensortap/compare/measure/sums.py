"""Sums of a sketch that agree: in small tensors, they show whether a pair differs only at positions that a mask hides.

Then every sum without an element of these positions agrees. The mask that a model is given, one number for each
position, is known from its own sketch, as long as no two of its elements are in one sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.measure.mask_pairs import padding_masks
from tensortap.core.sketches import fold
from tensortap.kernels import summarize
from tensortap.kernels.summary.visible import Positions, along

__all__ = ["agreeing_sums_between", "hidden_share", "positions_in"]

_AGREES = 4.0
"""Times the rounding of a record that one of its sums may be off."""
_LEAST = 8
"""Sums without a hidden element that it takes to say anything."""
_MOST_ELEMENTS = 1 << 16
"""In larger tensors, every sum has hidden elements."""

Floats = npt.NDArray[np.float64]


def agreeing_sums_between(
    reference: Side, candidate: Side, alignment: Alignment
) -> Callable[[int, float], float | None]:
    """Return a function of a pair and its rounding: which share of the sums without hidden elements agrees; None if
    that is not known."""
    hidden = _hidden_positions(reference, alignment)

    def of_pair(pair: int, rounding: float) -> float | None:
        left, right = int(alignment.reference[pair]), int(alignment.candidate[pair])
        shape = reference.shape(left)
        if hidden is None or np.prod(shape) > _MOST_ELEMENTS or shape != candidate.shape(right):
            return None
        if not (reference.has_sketch[left] and candidate.has_sketch[right]) or candidate.reordered[right]:
            return None
        size = min(reference.sketch_size, candidate.sketch_size)
        shown = _sums_without(hidden.tobytes(), hidden.shape, shape, size)
        if shown is None:
            return None
        ours, theirs = (_sketch(side, row, size) for side, row in ((reference, left), (candidate, right)))
        shown = shown & ((ours != 0) | (theirs != 0))
        if shown.sum() < _LEAST or not np.isfinite(ours + theirs).all():
            return None
        typical = float(np.sqrt(np.square(ours[shown]).mean()))
        return float((np.abs(ours - theirs)[shown] <= _AGREES * rounding * typical).mean())

    return of_pair


def hidden_share(reference: Side, alignment: Alignment) -> float:
    """Return the share of positions that a mask which the model is given hides; 1 if there is none."""
    shares = [
        float(reference.zeros[row] / np.prod(reference.shape(row))) for row in padding_masks(reference, alignment)
    ]
    return max(shares, default=1.0)


def positions_in(reference: Side, alignment: Alignment) -> Callable[[tuple[int, ...]], bool]:
    """Return a function of a shape: whether it has the axes of a mask that the model is given, batch and position."""
    shapes = {reference.shape(row) for row in padding_masks(reference, alignment)}
    return lambda shape: any(along(np.zeros(each, bool), shape) is not None for each in shapes)


def _hidden_positions(reference: Side, alignment: Alignment) -> Positions | None:
    """Return the positions that the first mask which the model is given hides; None if they are not known."""
    row = next((row for row in padding_masks(reference, alignment) if reference.has_sketch[row]), None)
    if row is None:
        return None
    shape, size = reference.shape(row), reference.sketch_size
    # Each element has a number of its own, so a sum of one element shows which it is.
    numbers = np.arange(1.0, np.prod(shape) + 1)
    places = _folded(numbers.reshape(shape), size) if len(numbers) <= size else np.zeros(size)
    used = places != 0
    if np.count_nonzero(used) < len(numbers):
        return None
    held = np.zeros(len(numbers))
    held[np.abs(places[used]).astype(int) - 1] = _sketch(reference, row, size)[used] * np.sign(places[used])
    return np.asarray(held == 0).reshape(shape) if np.isin(held, (0, 1)).all() else None


@cache
def _sums_without(
    hidden: bytes, positions: tuple[int, ...], shape: tuple[int, ...], size: int
) -> npt.NDArray[np.bool_] | None:
    """Return for each sum of a tensor's sketch whether no element at a hidden position is in it; None if the tensor
    does not have the axes of these."""
    where = along(np.frombuffer(hidden, bool).reshape(positions), shape)
    if where is None:
        return None
    elements = np.random.default_rng(0).random(shape)  # no two sums of them are zero by chance
    return np.asarray(_folded(np.where(where, 1 + elements, 0.0), size) == 0)


def _folded(array: Floats, size: int) -> Floats:
    return np.asarray(fold(summarize(np.ascontiguousarray(array)).sketch[None], size)[0], np.float64)


def _sketch(side: Side, row: int, size: int) -> Any:
    return side.sketches_at(np.array([row]), size)[0].astype(np.float64)
