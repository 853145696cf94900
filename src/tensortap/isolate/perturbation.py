"""Perturbs tensors by steps of their own precision, up or down at random, as rounding elsewhere may do."""

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
    """Moves every element of a tensor by some epsilons, relative to its value; reproducible by seed and key.

    `coarsest` returns the coarsest dtype of the call of a key: a module that takes float32 and returns bfloat16 rounds
    to bfloat16.
    """

    def __init__(self, seed: int, epsilons: int, coarsest: Callable[[Key], str | None]) -> None:
        self._seed = seed
        self._epsilons = epsilons
        self._coarsest = coarsest

    def apply(self, values: npt.NDArray[Any], key: Key) -> npt.NDArray[Any]:
        """Return the perturbed values.

        Zeros, integers, booleans, NaN and infinities stay unchanged. So do whole numbers that the model itself is
        given: they may be codes, such as masks and labels that are left out.
        """
        names = (dtypes.name_of(values.dtype), self._coarsest(key) or "")
        own, coarse = (EPSILON.get(name, 0.0) for name in names)
        if not own:
            return values
        random = np.random.default_rng((self._seed, crc32(repr(key).encode())))
        steps = self._epsilons * max(own, coarse) * (2.0 * random.integers(0, 2, values.shape) - 1.0)
        with np.errstate(all="ignore"):
            wide = values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
            moved: npt.NDArray[Any] = (wide * (1.0 + steps)).astype(values.dtype)
            stays = ~np.isfinite(moved)
            if key.kind == "input" and not key.module:
                stays |= wide == np.round(wide)
            return np.where(stays, values, moved)
