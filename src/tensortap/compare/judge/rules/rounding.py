"""Amounts of rounding: by dtype, by incoming error, for single rows, and as measured noise.

A module whose inputs are right may still differ by a few epsilons of the coarser dtype, since sums may be taken in
another order. And a module propagates its incoming error, somewhat magnified. So a record may be off by some epsilons,
or by some times the worst error among its sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["EPSILON", "NoiseAllowance", "Policy"]

EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "complex128": 2.0**-52,
    "complex64": 2.0**-23,
}
"""Distance from 1 to the next number, by dtype; integers have none."""

# Short dtypes are summed in a longer one and rounded once, so that few elements land elsewhere; the long ones carry the
# rounding of the whole sum.
_BASE = {"float64": 16.0, "float32": 16.0, "complex128": 16.0, "complex64": 16.0}
_BASE_OF_SHORT = 1.0
_LEAST = {"float16": 2.0**-24, "float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}
"""The least number of dtypes whose range ends where gradients are: smaller ones are rounded to it, or to zero."""
_GAIN = 16.0
# Rounding moves a number by about a quarter of an epsilon: whole epsilons everywhere do several times as much, and need
# no margin. The worst of many rows is another one each time, and needs one.
_RUNS, _STEPS, _STEPS_OF_ROWS = 3.0, 1.0, 4.0
# One row may be further off than the whole tensor, by this factor. In 72,000 pairs of right runs the worst row was off
# by up to 15 times the tolerance of the whole. Short rows have few elements to even out: with 8 elements, up to 30
# times; with 3 elements, up to 45 times.
_ROW_GAIN = 32.0
_SHORT_ROW = 32
# On the reference's own inputs there is less noise. In long dtypes a row that matters shows in the whole tensor, too,
# while the worst of many is off by thousands of epsilons where numbers cancel out. Rounding goes in all directions, so
# hardly any of it is along the tensor itself: an error along it counts double.
_ROW_GAIN_ALONE, _LEAST_ROW_ERROR, _LEAST_ROW = 4.0, 2.0**-12, 16
_ALONG, _LEAST_TENSOR = 2.0, 64

NoiseAllowance = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""By pair: the error of the whole tensor that measured noise allows, and that of its worst row."""


@dataclass(frozen=True)
class Policy:
    """The tolerance that the user asked for, and the arithmetic of relative L2 errors that rules use.

    rtol, atol: the user's own, for all pairs alike: |candidate - reference| <= atol * sqrt(elements) + rtol *
        |reference|.
    noise: what measured noise allows, by pair.
    alone: every module ran on the reference's own inputs, and no error comes in.
    mapped: the sides are of two frameworks, whose kernels round differently everywhere.
    """

    rtol: float | None = None
    atol: float | None = None
    noise: npt.NDArray[np.float64] | None = field(default=None, repr=False)
    alone: bool = False
    mapped: bool = False

    @property
    def fixed(self) -> bool:
        return self.rtol is not None or self.atol is not None

    def fixed_tolerance(self, l2: float, elements: int) -> float:
        """Return the user's own tolerance as a relative error."""
        absolute = (self.atol or 0.0) * elements**0.5
        return (self.rtol or 0.0) + (absolute / l2 if l2 > 0 else (np.inf if absolute > 0 else 0.0))

    @staticmethod
    def base(left: str, right: str) -> float:
        """Return the tolerance of a record with right sources, from the coarser of its two dtypes."""
        return max(EPSILON.get(name, 0.0) * _BASE.get(name, _BASE_OF_SHORT) for name in (left, right))

    @staticmethod
    def underflow(left: str, right: str) -> float:
        """Return the distance of two numbers near zero, in the coarser of two dtypes."""
        return max(_LEAST.get(name, 0.0) for name in (left, right))

    @staticmethod
    def lengthening(kind: str) -> float:
        """Return how much longer a record's sums are than a layer's: a parameter's gradient sums over all positions."""
        return 4.0 if kind == "param_grad" else 1.0

    @staticmethod
    def row_gain(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return how many times the tolerance of the whole the worst row may be off, by the length of rows."""
        return np.asarray(_ROW_GAIN * np.sqrt(np.maximum(_SHORT_ROW / np.maximum(lengths, 1), 1.0)))

    @staticmethod
    def passed_on(error: float) -> float:
        """Return the tolerance of a record whose sources have this error."""
        return _GAIN * error

    @staticmethod
    def of_runs(error: float) -> float:
        """Return the tolerance from a further run of the reference that differs by this error."""
        return _RUNS * error

    @staticmethod
    def of_steps(error: float, row_error: float) -> tuple[float, float]:
        """Return the tolerances from steps of one epsilon that move a record and its worst row by these errors."""
        return _STEPS * error, _STEPS_OF_ROWS * row_error

    @staticmethod
    def row_gain_alone(
        base: npt.NDArray[np.float64], counts: npt.NDArray[np.bool_], noise: NoiseAllowance | None
    ) -> npt.NDArray[np.float64]:
        """Return `row_gain` on the reference's own inputs, by pair. Rows that do not count may be off by anything."""
        gain = np.maximum(_ROW_GAIN_ALONE, _LEAST_ROW_ERROR / np.maximum(base, 1e-300))
        if noise is not None:
            gain = np.maximum(gain, noise[1] / np.maximum(np.maximum(base, noise[0]), 1e-300))
        return np.asarray(np.where(counts, gain, np.inf))

    @staticmethod
    def along(share: float) -> float:
        """Return how an error along the tensor itself counts, as if the tensor were scaled by 1 + `share`."""
        return _ALONG * abs(share)

    @staticmethod
    def has_direction(kind: str, elements: int) -> bool:
        """Whether there are enough numbers for rounding to cancel out along the tensor."""
        return elements >= _LEAST_TENSOR and kind not in ("param", "buffer")

    @staticmethod
    def has_rows(kind: str, length: int) -> bool:
        """Whether rows are meaningful: rows of parameters are not samples, and short rows are mostly noise."""
        return length >= _LEAST_ROW and kind not in ("param", "buffer")

    def described(self) -> str:
        rows = f"; {_ROW_GAIN_ALONE if self.alone else _ROW_GAIN:g} times as much of a single row"
        if self.fixed:
            return f"rtol {self.rtol or 0:g}, atol {self.atol or 0:g}, as given" + rows
        text = f"{_BASE['float32']:g} float32 epsilons, 1 of a shorter dtype"
        text += "" if self.alone else f", or {_GAIN:g} times the error that came in"
        return (f"the measured noise, or {text}" if self.noise is not None else text) + rows
