"""Converts any array to little-endian bytes, without a second copy of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["pieces"]


def pieces(array: npt.NDArray[Any], limit: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of `array` in C order. Copy an array that is not contiguous, at most `limit` bytes at a time.

    >>> [p.tolist() for p in pieces(np.arange(4, dtype=np.uint8).reshape(2, 2).T, 2)]
    [[0, 2], [1, 3]]
    """
    if array.size == 0:
        return
    little = array.dtype.newbyteorder("<")
    if array.flags.c_contiguous and array.dtype == little:
        yield array.reshape(-1).view(np.uint8)
    elif array.nbytes <= limit or array.size == 1:
        yield np.ascontiguousarray(array, dtype=little).reshape(-1).view(np.uint8)
    else:
        rows = max(1, limit // (array.nbytes // len(array)))
        for at in range(0, len(array), rows):
            yield from pieces(array[at] if rows == 1 and array.ndim > 1 else array[at : at + rows], limit)
