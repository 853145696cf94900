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
_LEAST_ELEMENTS = 256
_MOST_OFF = 2.0**-6
"""Relative error up to which a tensor counts as a GELU of another: rounding, in several operations, and not SiLU."""
_SURE = 0.15
"""Standard error up to which a fit is sure. Where each operation is rounded, it is three times as much."""
_LEAST_APART = 0.75
"""How far apart the fits of both sides must be: 1, less what fast kernels of erf add."""
_MOST_TRIED = 512
"""Pairs that are fitted in one comparison, in execution order: a wrong activation is wrong in every layer."""
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
    every = max(1, given.size // _SAMPLE)
    x, y = (each.reshape(-1)[::every].astype(np.float64) for each in (given, made))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    # Equal inputs are rounded alike, so they count once.
    x, places, times = np.unique(x, return_inverse=True, return_counts=True)
    y = np.bincount(places.reshape(-1), y) / times
    exact = 0.5 * x * (1 + np.asarray(_erf(x / math.sqrt(2)), np.float64))
    approximate = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    apart, off, size = approximate - exact, y - exact, float((times * exact**2).sum())
    if not size or (times * off**2).sum() > _MOST_OFF**2 * size:
        return None
    weights = times / (np.abs(exact) + 0.1) ** 2  # large numbers are rounded more
    total = float((weights * apart**2).sum())
    if not total:
        return None
    share = float((weights * apart * off).sum()) / total
    rest = off - share * apart
    return _Fit(share, float(np.sqrt(((weights * apart * rest) ** 2).sum())) / total)


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

    def arrays(pair: int) -> tuple[Array, Array]:
        return reference.array(int(alignment.reference[pair])), candidate.array(int(alignment.candidate[pair]))

    def kept(pair: int) -> bool:
        return all(bool(side.kept[int(rows[pair])]) for side, rows in sides)

    for pair in np.flatnonzero(where)[:_MOST_TRIED].tolist():
        shape = reference.shape(int(alignment.reference[pair]))
        for given in _inputs(pair, structure):
            if reference.shape(int(alignment.reference[given])) == shape and kept(given):
                if are_other_gelus(arrays(given), arrays(pair)):
                    found.add(pair)
                break
    return found


def _inputs(pair: int, structure: Structure) -> Iterator[int]:
    """Yield what an output may be computed from: of a container, what the last module that it called returned."""
    call = structure.call_of(pair)
    if call is not None:
        for child in reversed(call.children):
            yield from child.of("output")
        yield from call.of("input")
