"""Which GELU an activation computes: the exact one, by erf, or its approximation by tanh.

In bfloat16 the two are a seventh of an epsilon apart, which is less than correct kernels differ. But rounding has no
preferred direction, while the approximation's error is a smooth function of the input: a regression over all elements
shows which one was computed. Each side is fitted to its own inputs, so these may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.judge.structure import Structure

__all__ = ["SHORT_DTYPES", "are_other_gelus", "other_gelus_between"]

Array = npt.NDArray[Any]
SHORT_DTYPES = frozenset({"bfloat16", "float16"})
"""Longer ones show the difference by its size."""
_SAMPLE = 1 << 15
"""Elements that are read of a tensor."""
_LEAST_ELEMENTS, _FEW = 256, 1024
_MOST_OFF = 2.0**-6
"""Relative error up to which a tensor counts as a GELU of another: rounding, in several operations, and not SiLU."""
_SURE = 0.15
"""Standard error up to which a fit is sure. Where each operation is rounded, it is three times as much."""
_LEAST_APART = 0.75
"""How far apart the fits of both sides must be: 1, less what fast kernels of erf add."""
_MOST_TRIED = 512
"""Pairs that are fitted in one comparison, in execution order: a wrong activation is wrong in every layer."""
_LEAST = -0.175
"""The least value of a GELU is -0.17."""
_erf = np.frompyfunc(math.erf, 1, 1)


class _Fit(NamedTuple):
    share: float
    """0: the exact function. 1: the approximation."""
    standard_error: float

    @property
    def formula(self) -> int | None:
        """0 or 1; None if neither is sure."""
        return round(self.share) if self.standard_error <= _SURE and -0.5 < self.share < 1.5 else None


def are_other_gelus(given: tuple[Array, Array], made: tuple[Array, Array]) -> bool:
    """Whether one side computes a GELU by erf and the other by tanh, for certain.

    given: the inputs of both sides. made: their outputs.
    """
    ours = _fitted(given[0], made[0])
    if ours is None or ours.formula is None:
        return False
    theirs = _fitted(given[1], made[1])
    if theirs is None or theirs.formula is None:
        return False
    return ours.formula != theirs.formula and abs(ours.share - theirs.share) >= _LEAST_APART


def _fitted(given: Array, made: Array) -> _Fit | None:
    """Fit a tensor to both functions of another; None if it is neither."""
    if given.size != made.size or given.size < _LEAST_ELEMENTS:
        return None
    begin = max(0, given.size - _SAMPLE) // 2
    x, y = (each.reshape(-1)[begin : begin + _SAMPLE].astype(np.float64) for each in (given, made))
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or not _is_roughly_gelu(x[:_FEW], y[:_FEW]):
        return None
    # Equal inputs are rounded alike, so they count once.
    x, places, times = np.unique(x, return_inverse=True, return_counts=True)
    y = np.bincount(places.reshape(-1), y) / times
    exact = 0.5 * x * (1 + np.asarray(_erf(x / math.sqrt(2)), np.float64))
    apart, off, size = _approximate(x) - exact, y - exact, float((times * exact**2).sum())
    if not size or (times * off**2).sum() > _MOST_OFF**2 * size:
        return None
    weights = times / (np.abs(exact) + 0.1) ** 2  # large numbers are rounded more
    total = float((weights * apart**2).sum())
    if not total:
        return None
    share = float((weights * apart * off).sum()) / total
    rest = off - share * apart
    return _Fit(share, float(np.sqrt(((weights * apart * rest) ** 2).sum())) / total)


def _approximate(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _is_roughly_gelu(x: Array, y: Array) -> bool:
    """Whether numbers are a GELU of others, of any kind and with any rounding."""
    expected = _approximate(x)
    return bool(np.linalg.norm(y - expected) <= 2 * _MOST_OFF * np.linalg.norm(expected))


def other_gelus_between(
    reference: Side,
    candidate: Side,
    alignment: Alignment,
    structure: Structure,
    differ: npt.NDArray[np.bool_],
) -> set[int]:
    """Return the pairs of which one side is a GELU by erf and the other by tanh, among short ones that `differ`."""
    found: set[int] = set()
    if not len(alignment.reference) or not SHORT_DTYPES & set(reference.dtype.words) & set(candidate.dtype.words):
        return found
    sides = (reference, alignment.reference), (candidate, alignment.candidate)
    where = differ.copy()
    for side, rows in sides:
        where &= side.dtype.among(SHORT_DTYPES)[rows] & side.phase.among(("forward",))[rows] & side.kept[rows]
    where &= reference.kind.among(("output",))[alignment.reference]
    where &= reference.min[alignment.reference] >= _LEAST

    def arrays(pair: int) -> tuple[Array, Array]:
        return reference.array(int(alignment.reference[pair])), candidate.array(int(alignment.candidate[pair]))

    def fits(given: int, made: int) -> bool:
        """Whether a pair may be a GELU of another, as far as the ranges of the reference show."""
        x, y = int(alignment.reference[given]), int(alignment.reference[made])
        kept = all(bool(side.kept[int(rows[given])]) for side, rows in sides)
        if not kept or reference.shape(x) != reference.shape(y):
            return False
        return _is_roughly_gelu(np.array([float(reference.max[x])]), np.array([float(reference.max[y])]))

    tried = 0
    for pair in np.flatnonzero(where).tolist():
        given = next((each for each in _inputs(pair, structure) if fits(each, pair)), None)
        if given is None:
            continue
        if are_other_gelus(arrays(given), arrays(pair)):
            found.add(pair)
        if (tried := tried + 1) == _MOST_TRIED:
            break
    return found


def _inputs(pair: int, structure: Structure) -> Iterator[int]:
    """Yield what an output may be computed from: of a container, what the last module that it called returned."""
    call = structure.call_of(pair)
    if call is not None:
        for child in reversed(call.children):
            yield from child.of("output")
        yield from call.of("input")
