"""The sketch of a tensor without the positions that a mask hides, and where these are in a tensor.

It is the usual sketch of the tensor with zeros at hidden positions, folded to few sums: two of them show how far two
tensors are apart at all other positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core.sketches import fold
from tensortap.kernels import summarize

__all__ = ["SUMS", "Positions", "along", "sketch_of_visible"]

SUMS = 64
"""A distance is then known to 9 %, which suffices to tell rounding from a mistake."""

Array = npt.NDArray[Any]
Positions = npt.NDArray[np.bool_]
"""By batch and position: whether a mask hides it. A batch of one stands for all."""


def along(positions: Positions, shape: tuple[int, ...]) -> Positions | None:
    """Return the positions, to be broadcast to a shape whose axes of batch and sequence are where they usually are.

    Where a row is hidden as a whole, so it is in a shape with an axis of the batch alone.
    """
    batch, length = int(positions.shape[0]), int(positions.shape[1])
    fits = [batch in (1, size) for size in shape]
    if len(shape) == 4 and fits[0] and shape[2] == length:
        return positions.reshape(batch, 1, length, 1)
    if len(shape) > 1 and fits[0] and shape[1] == length:
        return positions.reshape(batch, length, *(1,) * (len(shape) - 2))
    if len(shape) > 2 and shape[0] == length and fits[1]:
        return np.transpose(positions).reshape(length, batch, *(1,) * (len(shape) - 2))
    if len(shape) > 1 and batch > 1 and shape[0] == batch * length:
        flat: Positions = positions.reshape((batch * length, *(1,) * (len(shape) - 1)))
        return flat
    empty = positions.all(axis=1)
    if shape and batch > 1 and fits[0] and empty.any():
        return np.asarray(empty.reshape(batch, *(1,) * (len(shape) - 1)), bool)
    return None


def sketch_of_visible(array: Array, hidden: Positions) -> npt.NDArray[np.float32] | None:
    """Return the sketch of an array without hidden positions; None if it does not have their axes."""
    where = along(hidden, array.shape)
    if where is None:
        return None
    shown = np.where(where, np.zeros((), array.dtype), array)
    folded: npt.NDArray[np.float32] = fold(summarize(np.ascontiguousarray(shown)).sketch[None], SUMS)[0]
    return folded
