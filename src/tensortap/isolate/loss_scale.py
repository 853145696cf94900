"""The scale of the loss: a gradient scaler of one side multiplies all gradients until the optimizer uses them.

A check compares such gradients at the reference's scale, and passes the reference's on at the model's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.loss_scales import loss_scale
from tensortap.store import Run

__all__ = ["LossScale", "times"]


class LossScale:
    """How much larger a model's gradients are than the reference's, step by step."""

    def __init__(self, reference: Run, rank: int) -> None:
        self._reference = reference
        self._rank = rank
        self._own = -1, 1.0
        """A step, and the scale of the loss whose backward runs in it."""
        self._known: dict[int, float | None] = {}
        """Step → scale of the reference; None if it is not known."""

    def begin(self, step: int, scale: float) -> bool:
        """Take note that the backward of a scaled loss begins. Return whether the reference tells its own scale."""
        self._own = step, scale
        return self._of_reference(step) is not None

    def end(self) -> None:
        """Take note that it is over: that of another loss may have no scale."""
        self._own = -1, 1.0

    def factor(self, step: int) -> float:
        """Return the model's scale divided by the reference's; 1 if that one is not known."""
        reference = self._of_reference(step)
        own = self._own[1] if self._own[0] == step else 1.0
        return 1.0 if reference is None else own / reference

    def _of_reference(self, step: int) -> float | None:
        if step not in self._known:
            self._known[step] = loss_scale(self._reference, self._rank, step)
        return self._known[step]


def times(values: npt.NDArray[Any], factor: float) -> npt.NDArray[Any]:
    """Multiply values, in their own dtype if it holds the results exactly, in float32 otherwise."""
    if factor == 1:
        return values
    with np.errstate(over="ignore"):
        product = values.astype(np.promote_types(values.dtype, np.float32)) * factor
        rounded = product.astype(values.dtype)
    return rounded if np.array_equal(rounded.astype(product.dtype), product, equal_nan=True) else product
