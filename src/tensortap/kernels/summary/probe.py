"""A few elements of an array, by which it is told whether one that was seen before is still the same.

Frameworks count most changes in place, but not those made behind their back (`x.data.mul_(2)`): an unchanged count with
changed elements must not pass for the same tensor.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["probe"]

_COUNT = 64
_SCATTER = 0x9E3779B1


def probe(array: npt.NDArray[np.generic]) -> bytes:
    """The bytes of a few elements, or of all if there are not many."""
    if array.size <= _COUNT:
        return array.tobytes()
    if not array.flags.c_contiguous:
        return bytes(np.asarray(array.flat[_places(array.size)]).tobytes())
    return array.reshape(-1).take(_places(array.size)).tobytes()


@lru_cache(4096)
def _places(size: int) -> npt.NDArray[np.int64]:
    """One in each of as many parts, but not always the part's first: those might all be of the same channel."""
    step = size // _COUNT
    return np.array([part * step + part * _SCATTER % step for part in range(_COUNT)], np.int64)
