"""The sketch of a tensor without the positions that a mask hides, and where these are in a tensor.

It is the usual sketch of the tensor with zeros at hidden positions, folded to few sums. Two such sketches show the
distance of two tensors at all other positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core.sketches import fold
from tensortap.kernels import summarize

__all__ = ["COPIES", "SUMS", "Positions", "along", "folded", "in_copies", "padding_of_texts", "sketch_of_visible"]

SUMS = 64
"""A distance is then known to 9 %, which suffices to distinguish rounding from a mistake."""

COPIES = "copies:"
"""Marks the sketch of a tensor that may hold several copies of all positions."""

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


def padding_of_texts(flags: Array) -> Positions | None:
    """Return the padding before and after each text, given a mask of 0 and 1 by text and token; None if there is none.
    If 0 means hidden, padding before a text sees nothing in a causal attention, and padding far behind one sees nothing
    through a window. With zeros within texts, only what is before them counts: the others may mean something else.

    If a text consists of zeros alone, 0 means that a token is seen: few batches have empty texts, and most have one
    without padding.
    """
    if flags.ndim > 2 and flags.size == flags.shape[0] * flags.shape[-1]:
        flags = flags.reshape(flags.shape[0], flags.shape[-1])
    if flags.ndim != 2 or flags.dtype.kind not in "biu" or not np.isin(flags, (0, 1)).all():
        return None
    zero = flags == 0
    found = np.asarray(np.logical_and.accumulate(zero, axis=1), bool)
    behind = np.logical_and.accumulate(zero[:, ::-1], axis=1)[:, ::-1]
    if not (zero & ~found & ~behind).any():
        found = found | behind
    return found if found.any() and not found.all(axis=1).any() else None


def in_copies(positions: Positions, shape: tuple[int, ...]) -> Positions | None:
    """Return the positions, to be broadcast to a shape that may hold several copies of them, as one for each expert."""
    copies, rest = divmod(shape[0] if shape else 0, positions.size)
    if len(shape) < 2 or positions.shape[0] < 2 or copies < 2 or rest:
        return None
    return np.tile(positions.reshape(-1), copies).reshape(-1, *(1,) * (len(shape) - 1))


def sketch_of_visible(array: Array, where: Positions) -> npt.NDArray[np.float32]:
    """Return the sketch of an array without hidden positions, which `along` or `in_copies` found in its shape."""
    shown = np.where(where, np.zeros((), array.dtype), array)
    return folded(summarize(np.ascontiguousarray(shown)).sketch)


def folded(sketch: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the few sums of a whole sketch."""
    sums: npt.NDArray[np.float32] = fold(sketch[None], SUMS)[0]
    return sums
