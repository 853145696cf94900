"""Whether a tensor that a checkpoint gave its values is back at the values from before.

An optimizer that keeps float32 copies of the parameters, made before the load, writes the random initial values back
in its first step. The step also moves them, so they never compare equal to the initial ones.

The test is a regression over sketches of 256 numbers: `now ≈ a · earlier + b · given + constant`. Training that goes on
from the checkpoint has a = 0 and b near 1, however far it moves. A checkpoint that was undone has a = 1 and b = 0. The
residual gives the error bars of both. A residual that is large compared with what tells the two values apart makes them
wide, and nothing is claimed: after a huge step, or if the checkpoint hardly differs from the initial values.
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

_NOTICEABLE = 0.2
"""Share of the earlier values that must be back, and share of the given ones that must be gone. Optimizers that average
their parameters with copies of their own bring back a part."""
_MOST = 0.8
"""The same for others than optimizers: people mix the weights of two models on purpose."""
_SIGMAS = 5.0
"""Width of the error bars, as in a normal distribution: thousands of tensors are tested at every step."""
_NEARER = 0.8
"""A tensor that cannot be tested by itself follows the others if its distance to the earlier values is at most this
share of its distance to the given ones."""

_CLOSE = 0.25
"""Share of the distance between earlier and given values, and of the earlier ones' own size."""
_FEWEST = 8
"""Elements from which on a step that leads as close as that is no accident: one in 100,000 of the size would."""
_PARALLEL = 1e-5
"""Relative difference below which two values count as the same: sketches are float32."""
_ROUNDED = 0.01
"""Relative distance of a bfloat16 copy, with room to spare."""


@dataclass(frozen=True, slots=True)
class UndoneLoad:
    """What put earlier values back into a tensor after a load."""

    step: int
    by: str
    """optimizer | forward | something else"""
    where: str
    loaded_at: str
    """Where the values came from that are gone."""
    initial: bool
    """Whether the values that came back are the initial ones; else those from just before the load."""
    share: float
    """About how much of them is back; 1 is all."""

    @property
    def values(self) -> str:
        """What came back, in words."""
        return "initial values" if self.initial else f"values from before {self.loaded_at}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, eq=False)
class _Origin:
    """Summaries of what a tensor was, about 1 kB each whatever its size. None while it has no elements."""

    initial: Summary | None
    before: Summary | None = None
    """Just before the last load."""
    given: Summary | None = None
    """Just after the last load, or after a change by hand before the first step."""
    loaded: bool = False
    """Whether a load gave the values, and not somebody's own code."""
    where: str = ""
    undone: UndoneLoad | None = None


class UndoneLoadDetector:
    """Remembers where the values of each tensor came from, and finds those that are back where they were."""

    def __init__(self) -> None:
        self._origins: dict[str, _Origin] = {}

    def begin(self, name: str, summary: Summary | None) -> None:
        """Note the initial values of a tensor: those of its first elements."""
        self._origins[name] = _Origin(summary)

    def gave(self, name: str, before: Summary | None, now: Summary | None, where: str) -> None:
        """Note that a load gave the tensor its values."""
        origin = self._origins.setdefault(name, _Origin(None))
        origin.before, origin.given, origin.loaded, origin.where, origin.undone = before, now, True, where, None

    def set(self, name: str, now: Summary | None, where: str) -> None:
        """Note that somebody's own code gave the tensor its values, as some libraries do to load."""
        origin = self._origins.setdefault(name, _Origin(None))
        if origin.undone is None:
            origin.given, origin.where = now, where

    def undone(self, name: str) -> UndoneLoad | None:
        """What undid the load of this tensor, if its effect still lasts."""
        origin = self._origins.get(name)
        return None if origin is None else origin.undone

    def changed(self, summaries: Mapping[str, Summary | None], by: str, step: int, where: str) -> dict[str, UndoneLoad]:
        """Judge the tensors that one event has changed; return those whose load it has undone."""
        found: dict[str, UndoneLoad] = {}
        unsure: list[str] = []
        for name, now in summaries.items():
            origin = self._origins.get(name)
            if origin is None or origin.given is None or now is None:
                continue
            if origin.undone is not None:
                if _restored(origin, now):
                    origin.undone = None
                continue
            for initial, earlier in _candidates(origin, by):
                share = _returned(earlier, origin.given, now, by)
                if share is not None:
                    found[name] = UndoneLoad(step, by, where, origin.where, initial, share)
                    break
            else:
                unsure.append(name)
        if found:
            found |= self._followers(unsure, summaries, next(iter(found.values())))
        for name, undone in found.items():
            self._origins[name].undone = undone
        return found

    def _followers(
        self, names: Collection[str], summaries: Mapping[str, Summary | None], leader: UndoneLoad
    ) -> dict[str, UndoneLoad]:
        """Small and constant tensors prove nothing alone, but those near their earlier values follow the others."""
        found = {}
        for name in names:
            origin, now = self._origins[name], summaries[name]
            assert origin.given is not None and now is not None
            for initial, earlier in _candidates(origin, leader.by):
                if initial == leader.initial and _nearer(now, earlier, origin.given):
                    found[name] = replace(leader, loaded_at=origin.where)
        return found


def same_values(source: Summary, copy: Summary | None) -> bool:
    """Whether one tensor is a copy of the other, be it in fewer bits."""
    return copy is not None and _comparable(source, copy) and sketch_distance(source, copy) <= _ROUNDED * source.l2


def _candidates(origin: _Origin, by: str) -> list[tuple[bool, Summary]]:
    """(whether it is the initial one, summary) of the earlier values that this event may have put back.

    Code that swaps weights in and out restores values from before a load on purpose. Nobody restores random initial
    values, and no optimizer has a reason to restore any.
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
        if summary is not None and _comparable(summary, origin.given) and summary.digest != origin.given.digest
    ]


def _comparable(*summaries: Summary) -> bool:
    return len({summary.elements for summary in summaries}) == 1 and not any(s.nonfinite for s in summaries)


def _returned(earlier: Summary, given: Summary, now: Summary, by: str) -> float | None:
    """Return the share of `earlier` that is back in `now`, or None if that is not certain.

    Constant values carry no mark of their own: people reset a bias to zero, and optimizers may shrink it to that.
    """
    if not _comparable(earlier, given, now) or earlier.min == earlier.max:
        return None
    if now.digest == earlier.digest:
        return 1.0
    if _close(now, earlier, given):
        return 1.0
    back, kept = _regression(now, earlier, given)
    least = _NOTICEABLE if by == "optimizer" else _MOST
    if back.value - back.bar > least and kept.value + kept.bar < 1 - least:
        return back.value
    return None


def _close(now: Summary, earlier: Summary, given: Summary) -> bool:
    """Whether `now` is so close to `earlier` that no step leads there by chance: for tensors of few elements, of which
    the regression has little to estimate its error bars from."""
    if now.elements < _FEWEST:
        return False
    ones = _sketch_of_ones(now.elements).astype(np.float64)
    centred = [s.sketch - ones * (s.sketch @ ones) / (ones @ ones) for s in (now, earlier, given)]
    size, apart = np.linalg.norm(centred[1]), np.linalg.norm(centred[2] - centred[1])
    told_apart = apart > _PARALLEL * given.l2
    return bool(told_apart and np.linalg.norm(centred[0] - centred[1]) <= _CLOSE * min(size, apart))


def _nearer(now: Summary, one: Summary, other: Summary) -> bool:
    """Whether `now` is clearly nearer to `one` than to the `other`."""
    return _comparable(now, one, other) and sketch_distance(now, one) <= _NEARER * sketch_distance(now, other)


def _restored(origin: _Origin, now: Summary) -> bool:
    """Whether a tensor that was undone has the given values again."""
    given, undone = origin.given, origin.undone
    assert given is not None and undone is not None
    earlier = origin.initial if undone.initial else origin.before
    if earlier is None or not _comparable(earlier, given, now):
        return False
    if now.digest == given.digest:
        return True
    if earlier.min == earlier.max:
        return _nearer(now, given, earlier)
    back, kept = _regression(now, earlier, given)
    return back.value + back.bar < 1 - _MOST and kept.value - kept.bar > _MOST


@dataclass(frozen=True, slots=True)
class _Weight:
    value: float
    bar: float
    """Half the width of its error bar; infinite if nothing can be said."""


def _regression(now: Summary, earlier: Summary, given: Summary) -> tuple[_Weight, _Weight]:
    """The weights of `earlier` and `given` in `now`, by least squares over the sketches."""
    columns = [earlier.sketch, given.sketch, _sketch_of_ones(now.elements)]
    if given.min == given.max:
        del columns[1]  # the constant has its place
    freedom = min(now.elements, len(now.sketch)) - len(columns)
    found = _least_squares(np.stack(columns, axis=1, dtype=np.float64), now.sketch) if freedom > 0 else None
    if found is None:
        return _Weight(0.0, math.inf), _Weight(0.0, math.inf)
    values, spread, residual = found
    bars = math.sqrt(residual / freedom) * _student(freedom) * spread
    weights = [_Weight(float(value), float(bar)) for value, bar in zip(values, bars, strict=True)]
    return weights[0], weights[1] if len(columns) == 3 else _Weight(0.0, 0.0)


@lru_cache(4096)
def _sketch_of_ones(elements: int) -> npt.NDArray[np.float32]:
    """For the constant: a step may move all elements alike, and checkpoints may differ by little else."""
    return summarize(np.ones(elements, np.float32)).sketch


def _least_squares(
    design: npt.NDArray[np.float64], target: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float] | None:
    """Weights, their spread for unit noise, and the squared residual; None if columns are parallel."""
    orthogonal, triangle = np.linalg.qr(design)
    if (np.abs(np.diagonal(triangle)) <= _PARALLEL * np.linalg.norm(design, axis=0)).any():
        return None
    inverse = np.linalg.inv(triangle)
    inside = orthogonal.T @ target
    residual = float(np.sum((target - orthogonal @ inside) ** 2))
    return inverse @ inside, np.sqrt(np.sum(inverse**2, axis=1)), residual


def _student(freedom: int) -> float:
    """How many standard errors make the bar for so many degrees of freedom: Student's t, approximated.

    >>> [round(_student(freedom)) for freedom in (4, 10, 30, 254)]
    [67, 11, 6, 5]
    """
    exponent = _SIGMAS**2 * (freedom - 5 / 6) / (freedom - 2 / 3 + 0.1 / freedom) ** 2
    return math.sqrt(freedom * math.expm1(exponent)) if exponent < 500 else math.inf
