"""A sample of an array's elements that shows whether the array has changed since it was last seen.

Frameworks count most in-place changes, but not all (`x.data.mul_(2)`). A tensor with an unchanged count and changed
elements must not be taken for the same tensor.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["probe"]

_COUNT = 64
_SCATTER = 0x9E3779B1


def probe(array: npt.NDArray[np.generic]) -> bytes:
    """Return the bytes of a few elements, or of all elements of a small array."""
    if array.size <= _COUNT:
        return array.tobytes()
    if not array.flags.c_contiguous:
        return bytes(np.asarray(array.flat[_places(array.size)]).tobytes())
    return array.reshape(-1).take(_places(array.size)).tobytes()


@lru_cache(4096)
def _places(size: int) -> npt.NDArray[np.int64]:
    """Return one position in each of `_COUNT` parts, at varying offsets: first elements may all be of one channel."""
    step = size // _COUNT
    return np.array([part * step + part * _SCATTER % step for part in range(_COUNT)], np.int64)
