"""Detection of undone loads: a tensor that a checkpoint set is back at its earlier values.

An optimizer that keeps float32 copies of the parameters, made before the load, writes the random initial values back
in its first step. The step also changes them, so they never compare equal to the initial ones.

The test is a regression over sketches of 256 numbers: `now ≈ a · earlier + b · given + constant`. Training that
continues from the checkpoint has a = 0 and b near 1, however far it moves. An undone load has a = 1 and b = 0. The
residual gives the error bars of both. After a huge step, or if the checkpoint hardly differs from the initial values,
the residual is large compared with their distance: the bars are wide, and the test makes no claim.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core.records import Summary
from tensortap.kernels import summarize
from tensortap.kernels.summary.reference import sketch_distance

__all__ = ["UndoneLoad", "UndoneLoadDetector", "same_values"]

_MIN_SHARE_OPTIMIZER = 0.2
"""Share of the earlier values that must be back after an optimizer step, and of the given ones that must be gone.
Optimizers that average parameters with their own copies bring back a part."""
_MIN_SHARE_OTHER = 0.8
"""The same for all other events: users mix the weights of two models on purpose."""
_SIGMAS = 5.0
"""Width of the error bars in standard deviations. It is wide because every step tests thousands of tensors."""
_FOLLOWER_RATIO = 0.8
"""A tensor that cannot be tested alone follows the others if its distance to the earlier values is at most this share
of its distance to the given ones."""

_CLOSE_SHARE = 0.25
"""Largest distance to the earlier values that counts as close, as a share of their size and of their distance to the
given ones."""
_MIN_ELEMENTS = 8
"""Number of elements from which closeness is not an accident: one in 100,000 such steps gets there by chance."""
_SAME_TOLERANCE = 1e-5
"""Relative difference below which two values count as the same: sketches are float32."""
_COPY_TOLERANCE = 0.01
"""Upper bound on the relative distance of a bfloat16 copy, with a margin."""


@dataclass(frozen=True, slots=True)
class UndoneLoad:
    """The event that put earlier values back into a tensor after a load."""

    step: int
    by: str
    """optimizer | forward | something else"""
    where: str
    loaded_at: str
    """Line of the load whose values are gone."""
    initial: bool
    """Whether the initial values came back; else those from just before the load."""
    share: float
    """Estimated share of them that is back; 1 is all."""

    @property
    def values(self) -> str:
        """The values that came back, in words."""
        return "initial values" if self.initial else f"values from before {self.loaded_at}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, eq=False)
class _Origin:
    """Summaries of a tensor's earlier values, about 1 kB each. None while the tensor has no elements."""

    initial: Summary | None
    before: Summary | None = None
    """Values just before the last load."""
    given: Summary | None = None
    """Values just after the last load, or after a change by user code before the first step."""
    loaded: bool = False
    """Whether a load set the given values, not user code."""
    where: str = ""
    undone: UndoneLoad | None = None


class UndoneLoadDetector:
    """Tracks the origin of each tensor's values, and finds tensors that are back at earlier ones."""

    def __init__(self) -> None:
        self._origins: dict[str, _Origin] = {}

    def set_initial(self, name: str, summary: Summary | None) -> None:
        """Set the initial values of a tensor: the first it has elements for."""
        self._origins[name] = _Origin(summary)

    def set_loaded(self, name: str, before: Summary | None, now: Summary | None, where: str) -> None:
        """Set the values that a load gave the tensor."""
        origin = self._origins.setdefault(name, _Origin(None))
        origin.before, origin.given, origin.loaded, origin.where, origin.undone = before, now, True, where, None

    def set_by_user(self, name: str, now: Summary | None, where: str) -> None:
        """Set the values that user code gave the tensor; some libraries load like this."""
        origin = self._origins.setdefault(name, _Origin(None))
        if origin.undone is None:
            origin.given, origin.where = now, where

    def find(self, name: str) -> UndoneLoad | None:
        """Return the event that undid the load of this tensor, while its effect lasts."""
        origin = self._origins.get(name)
        return None if origin is None else origin.undone

    def detect(self, summaries: Mapping[str, Summary | None], by: str, step: int, where: str) -> dict[str, UndoneLoad]:
        """Test the tensors that one event changed; return those whose load it undid."""
        found: dict[str, UndoneLoad] = {}
        unsure: list[str] = []
        for name, now in summaries.items():
            origin = self._origins.get(name)
            if origin is None or origin.given is None or now is None:
                continue
            if origin.undone is not None:
                if _is_restored(origin, now):
                    origin.undone = None
                continue
            for initial, earlier in _earlier_values(origin, by):
                share = _share_back(earlier, origin.given, now, by)
                if share is not None:
                    found[name] = UndoneLoad(step, by, where, origin.where, initial, share)
                    break
            else:
                unsure.append(name)
        if found:
            found |= self._find_followers(unsure, summaries, next(iter(found.values())))
        for name, undone in found.items():
            self._origins[name].undone = undone
        return found

    def _find_followers(
        self, names: Collection[str], summaries: Mapping[str, Summary | None], leader: UndoneLoad
    ) -> dict[str, UndoneLoad]:
        """Return small and constant tensors that prove nothing alone, but are near their earlier values like others."""
        found = {}
        for name in names:
            origin, now = self._origins[name], summaries[name]
            assert origin.given is not None and now is not None
            for initial, earlier in _earlier_values(origin, leader.by):
                if initial == leader.initial and _is_nearer(now, earlier, origin.given):
                    found[name] = replace(leader, loaded_at=origin.where)
        return found


def same_values(source: Summary, copy: Summary | None) -> bool:
    """Return whether one tensor is a copy of the other, possibly in fewer bits."""
    return (
        copy is not None
        and _are_comparable(source, copy)
        and sketch_distance(source, copy) <= _COPY_TOLERANCE * source.l2
    )


def _earlier_values(origin: _Origin, by: str) -> list[tuple[bool, Summary]]:
    """Return (whether initial, summary) of the earlier values whose return would undo a load.

    Code that swaps weights restores values from before a load on purpose, so these count for optimizers only. Neither
    has a reason to restore random initial values.
    """
    assert origin.given is not None
    candidates = []
    if by == "optimizer" or origin.loaded:
        candidates.append((True, origin.initial))
    if by == "optimizer":
        candidates.append((False, origin.before))
    return [
        (initial, summary)
        for initial, summary in candidates
        if summary is not None and _are_comparable(summary, origin.given) and summary.digest != origin.given.digest
    ]


def _are_comparable(*summaries: Summary) -> bool:
    return len({summary.elements for summary in summaries}) == 1 and not any(s.nonfinite for s in summaries)


def _share_back(earlier: Summary, given: Summary, now: Summary, by: str) -> float | None:
    """Return the share of `earlier` that is back in `now`, or None if it is uncertain.

    Constant values prove nothing: users reset a bias to zero, and optimizers may shrink it to that.
    """
    if not _are_comparable(earlier, given, now) or earlier.min == earlier.max:
        return None
    if now.digest == earlier.digest:
        return 1.0
    if _is_close(now, earlier, given):
        return 1.0
    back, kept = _regression(now, earlier, given)
    least = _MIN_SHARE_OPTIMIZER if by == "optimizer" else _MIN_SHARE_OTHER
    if back.value - back.bar > least and kept.value + kept.bar < 1 - least:
        return back.value
    return None


def _is_close(now: Summary, earlier: Summary, given: Summary) -> bool:
    """Return whether `now` is too close to `earlier` for a step to lead there by chance.

    This test is for tensors of few elements, where the regression has too little data to estimate its error bars.
    """
    if now.elements < _MIN_ELEMENTS:
        return False
    ones = _sketch_of_ones(now.elements).astype(np.float64)
    centred = [s.sketch - ones * (s.sketch @ ones) / (ones @ ones) for s in (now, earlier, given)]
    size, apart = np.linalg.norm(centred[1]), np.linalg.norm(centred[2] - centred[1])
    distinct = apart > _SAME_TOLERANCE * given.l2
    return bool(distinct and np.linalg.norm(centred[0] - centred[1]) <= _CLOSE_SHARE * min(size, apart))


def _is_nearer(now: Summary, one: Summary, other: Summary) -> bool:
    """Return whether `now` is clearly nearer to `one` than to `other`."""
    return _are_comparable(now, one, other) and sketch_distance(now, one) <= _FOLLOWER_RATIO * sketch_distance(
        now, other
    )


def _is_restored(origin: _Origin, now: Summary) -> bool:
    """Return whether a tensor whose load was undone has the given values again."""
    given, find = origin.given, origin.undone
    assert given is not None and find is not None
    earlier = origin.initial if find.initial else origin.before
    if earlier is None or not _are_comparable(earlier, given, now):
        return False
    if now.digest == given.digest:
        return True
    if earlier.min == earlier.max:
        return _is_nearer(now, given, earlier)
    back, kept = _regression(now, earlier, given)
    return back.value + back.bar < 1 - _MIN_SHARE_OTHER and kept.value - kept.bar > _MIN_SHARE_OTHER


@dataclass(frozen=True, slots=True)
class _Coefficient:
    value: float
    bar: float
    """Half the width of its error bar; infinite if it cannot be estimated."""


def _regression(now: Summary, earlier: Summary, given: Summary) -> tuple[_Coefficient, _Coefficient]:
    """Return the coefficients of `earlier` and `given` in `now`, by least squares over the sketches."""
    columns = [earlier.sketch, given.sketch, _sketch_of_ones(now.elements)]
    if given.min == given.max:
        del columns[1]  # parallel to the constant
    freedom = min(now.elements, len(now.sketch)) - len(columns)
    found = _least_squares(np.stack(columns, axis=1, dtype=np.float64), now.sketch) if freedom > 0 else None
    if found is None:
        return _Coefficient(0.0, math.inf), _Coefficient(0.0, math.inf)
    values, spread, residual = found
    bars = math.sqrt(residual / freedom) * _student_factor(freedom) * spread
    weights = [_Coefficient(float(value), float(bar)) for value, bar in zip(values, bars, strict=True)]
    return weights[0], weights[1] if len(columns) == 3 else _Coefficient(0.0, 0.0)


@lru_cache(4096)
def _sketch_of_ones(elements: int) -> npt.NDArray[np.float32]:
    """Return the sketch of the constant term: a step, or two checkpoints, may differ by a constant."""
    return summarize(np.ones(elements, np.float32)).sketch


def _least_squares(
    design: npt.NDArray[np.float64], target: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float] | None:
    """Return coefficients, their spread for unit noise, and the squared residual; None if columns are parallel."""
    orthogonal, triangle = np.linalg.qr(design)
    if (np.abs(np.diagonal(triangle)) <= _SAME_TOLERANCE * np.linalg.norm(design, axis=0)).any():
        return None
    inverse = np.linalg.inv(triangle)
    inside = orthogonal.T @ target
    residual = float(np.sum((target - orthogonal @ inside) ** 2))
    return inverse @ inside, np.sqrt(np.sum(inverse**2, axis=1)), residual


def _student_factor(freedom: int) -> float:
    """Return the width of the error bar in standard errors for these degrees of freedom: Student's t, approximated.

    >>> [round(_student_factor(freedom)) for freedom in (4, 10, 30, 254)]
    [67, 11, 6, 5]
    """
    exponent = _SIGMAS**2 * (freedom - 5 / 6) / (freedom - 2 / 3 + 0.1 / freedom) ** 2
    return math.sqrt(freedom * math.expm1(exponent)) if exponent < 500 else math.inf
