"""A digest of the rows of a tensor that does not depend on their order.

Each row, along the first axis, gives 64 bits over its bytes and their positions within the row; the digest is the sum
of these, mixed, modulo 2⁶⁴. So the digests of two parts of the rows add up to that of the whole.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["digest_of_rows"]

_MOST_WORDS = 1 << 17
"""Words of 8 bytes that are read of a tensor. Of longer rows, evenly spaced words count."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)


def digest_of_rows(array: npt.NDArray[Any]) -> int | None:
    """Return the digest of the rows of an array; None if it has none, or only one.

    >>> tokens = np.arange(12).reshape(4, 3)
    >>> digest_of_rows(tokens) == digest_of_rows(tokens[[2, 0, 3, 1]])
    True
    """
    if array.ndim == 0 or array.shape[0] < 2 or not array.size:
        return None
    rows = array.shape[0]
    data = np.ascontiguousarray(array).view(np.uint8).reshape(rows, -1)
    if data.shape[1] % 8:
        data = np.pad(data, ((0, 0), (0, 8 - data.shape[1] % 8)))
    words = data.view(np.uint64)
    apart = -(-words.shape[1] * rows // _MOST_WORDS)  # rounded up
    words = words[:, ::apart]
    with np.errstate(over="ignore"):
        of_rows = (words * _factors(words.shape[1])).sum(axis=1, dtype=np.uint64)
        return int(_mixed(of_rows + _GOLDEN).sum(dtype=np.uint64))


@lru_cache(8)  # most steps read batches of one shape
def _factors(count: int) -> npt.NDArray[np.uint64]:
    """Return the factor of each word of a row."""
    factors = _mixed((np.arange(count, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    return np.asarray(factors | np.uint64(1), np.uint64)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread every bit of a number over all of them."""
    for factor in (_FIRST, _SECOND):
        values = np.asarray((values ^ (values >> _SHIFT)) * factor, np.uint64)
    return np.asarray(values ^ (values >> _SHIFT), np.uint64)
