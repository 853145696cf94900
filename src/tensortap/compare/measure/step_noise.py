"""How far an optimizer that divides a gradient by its own size, such as Adam, may carry the gradient's noise.

Such a step moves each element by about the same amount. Its error is the error of the gradient's element relative to
that element: large only where the gradient is nearly zero, so that noise decides the sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side

__all__ = ["step_noise", "step_noise_between"]

_FLIPPED = 2.0
"""Error of an element whose sign is the other one, in steps."""
_LARGEST = 1 << 20
"""Elements up to which a gradient is read to measure this."""


def step_noise(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> float:
    """Return the error of a step along the signs of a gradient, relative to the size of the step.

    >>> step_noise(np.array([1.0, -2.0]), np.array([1.0, -2.0])), step_noise(np.array([1e-9]), np.array([-1e-9]))
    (0.0, 2.0)
    """
    left, right = (array.astype(np.float64).reshape(-1) for array in (ours, theirs))
    if not left.size or not (np.isfinite(left).all() and np.isfinite(right).all()):
        return _FLIPPED
    size = np.maximum(np.abs(left), np.abs(right))
    apart = np.divide(np.abs(left - right), size, out=np.zeros_like(size), where=size > 0)
    return float(np.sqrt(np.mean(np.square(np.minimum(apart, _FLIPPED)))))


def step_noise_between(reference: Side, candidate: Side, alignment: Alignment) -> Callable[[int], float | None]:
    """Return a function of a pair of gradients: their `step_noise`; None if their elements were not stored."""

    def found(pair: int) -> float | None:
        ours, theirs = int(alignment.reference[pair]), int(alignment.candidate[pair])
        if not (reference.kept[ours] and candidate.kept[theirs]) or reference.elements[ours] > _LARGEST:
            return None
        arrays = reference.array(ours), candidate.array(theirs)
        return step_noise(*arrays) if arrays[0].shape == arrays[1].shape else None

    return found
