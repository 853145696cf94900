"""Numbers moved by one step of their own precision, up or down at random: what rounding somewhere else may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.rules.rounding import EPSILON
from tensortap.core import dtypes
from tensortap.core.records import Key

__all__ = ["Perturbation"]


class Perturbation:
    """Moves every number of a tensor by some epsilons, relative to itself. The same seed moves the same tensor alike.

    `coarsest` tells the coarsest dtype that the call of a key works with: a module that takes float32 and returns
    bfloat16 rounds to that.
    """

    def __init__(self, seed: int, epsilons: int, coarsest: Callable[[Key], str | None]) -> None:
        self._seed = seed
        self._epsilons = epsilons
        self._coarsest = coarsest

    def of(self, values: npt.NDArray[Any], key: Key) -> npt.NDArray[Any]:
        """Zeros stay zeros; integers, truth values, NaN and infinities stay what they are."""
        names = (dtypes.name_of(values.dtype), self._coarsest(key) or "")
        own, coarse = (EPSILON.get(name, 0.0) for name in names)
        if not own:
            return values
        random = np.random.default_rng((self._seed, crc32(repr(key).encode())))
        steps = self._epsilons * max(own, coarse) * (2.0 * random.integers(0, 2, values.shape) - 1.0)
        with np.errstate(all="ignore"):
            wide = values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
            moved: npt.NDArray[Any] = (wide * (1.0 + steps)).astype(values.dtype)
            return np.where(np.isfinite(moved), moved, values)
