"""A sample of an array's elements that shows whether the array has changed since it was last seen.

Frameworks count most in-place changes, but not all (`x.data.mul_(2)`). A tensor with an unchanged count and changed
elements must not be taken for the same tensor.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["PROBED", "SCATTER", "probe"]

PROBED = 64
"""Elements of a sample, one in each of as many parts."""
SCATTER = 0x9E3779B1
"""Number whose multiples are the offsets in the parts: first elements may all be of one channel."""


def probe(array: npt.NDArray[np.generic]) -> bytes:
    """Return the bytes of a few elements, or of all elements of a small array."""
    if array.size <= PROBED:
        return array.tobytes()
    if not array.flags.c_contiguous:
        return bytes(np.asarray(array.flat[_places(array.size)]).tobytes())
    return array.reshape(-1).take(_places(array.size)).tobytes()


@lru_cache(4096)
def _places(size: int) -> npt.NDArray[np.int64]:
    """Return one position in each part."""
    step = size // PROBED
    return np.array([part * step + part * SCATTER % step for part in range(PROBED)], np.int64)
