"""The row of a tensor that is furthest off."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["worst_row"]

_FLOOR = 1 / 8


def worst_row(reference: npt.NDArray[np.generic], candidate: npt.NDArray[np.generic]) -> float:
    """The greatest relative error of a row along the last dimension; small rows count as an eighth of the usual size."""
    shape = reference.shape
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    if not reference.size:
        return 0.0
    wide = [np.nan_to_num(np.asarray(a).astype(np.float64)).reshape(-1, *shape[-1:]) for a in (reference, candidate)]
    sizes, off = (np.linalg.norm(a.reshape(len(a), -1), axis=1) for a in (wide[0], wide[1] - wide[0]))
    floor = _FLOOR * np.linalg.norm(sizes) / np.sqrt(len(sizes))
    with np.errstate(all="ignore"):
        return float(np.where(off > 0, off / np.maximum(sizes, floor), 0.0).max())
