"""Lists of the same tokens in another order, as of experts that run one by one, grouped or in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.judge.rules.rounding import EPSILON, Policy
from tensortap.compare.measure.hidden import nearest_tokens
from tensortap.core import dtypes

__all__ = ["LEAST_REORDERED", "OTHER_ORDER", "are_reordered", "reordered_between"]

Array = npt.NDArray[Any]

OTHER_ORDER = "it is made inside experts, and has the same tokens in another order"
LEAST_REORDERED = 0.1
"""Relative error from which on another order is looked for: other tokens are further apart."""
_LARGEST = 1 << 22
"""Elements up to which rows are looked for."""
_MOST = 2.0**-5
"""The largest relative error up to which tokens count as the same."""
_FARTHER = 4.0
"""Times that nearest tokens, or extreme elements, may be further off than what is allowed of the same ones."""


def are_reordered(ours: Array, theirs: Array, allowed: float = 0.0) -> bool:
    """Whether two lists of rows are the same in another order, up to rounding or a relative error.

    >>> rows = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    >>> are_reordered(rows, rows[::-1]), are_reordered(rows, rows[:, ::-1])
    (True, False)
    """
    if ours.ndim != 2 or ours.shape != theirs.shape or len(ours) < 2 or ours.size > _LARGEST:
        return False
    names = [dtypes.name_of(each.dtype) for each in (ours, theirs)]
    if not all(name in EPSILON and not name.startswith("complex") for name in names):
        return False
    if not all(np.isfinite(each.astype(np.float64)).all() for each in (ours, theirs)):
        return False
    allowed = min(_MOST, max(allowed, Policy.base(*names)))
    for one, other in ((ours, theirs), (theirs, ours)):
        apart, sizes = nearest_tokens(one, other)
        if not float(np.linalg.norm(apart)) <= _FARTHER * allowed * float(np.linalg.norm(sizes)):
            return False
    return True


def reordered_between(reference: Side, candidate: Side, alignment: Alignment) -> Callable[[int, float], bool]:
    """Return a function of a pair that tells whether its rows are in another order. From summaries, sums over all
    elements and the extremes agree up to a relative error, which the function is given."""

    def is_reordered(pair: int, allowed: float) -> bool:
        left, right = int(alignment.reference[pair]), int(alignment.candidate[pair])
        if len(reference.shape(left)) != 2 or reference.shape(left) != candidate.shape(right):
            return False
        if reference.kept[left] and candidate.kept[right]:
            return are_reordered(reference.array(left), candidate.array(right), allowed)
        return _agree((reference, left), (candidate, right), min(_MOST, allowed))

    return is_reordered


def _agree(ours: tuple[Side, int], theirs: tuple[Side, int], allowed: float) -> bool:
    """Whether norms, means, zeros and extremes agree."""
    left, row = ours
    size, elements = float(left.l2[row]), max(1, int(left.elements[row]))
    sums = [(float(side.l2[at]), float(side.l1[at]) / elements**0.5) for side, at in (ours, theirs)]
    means = [float(side.mean[at]) * elements**0.5 for side, at in (ours, theirs)]
    extremes = [(float(side.min[at]), float(side.max[at])) for side, at in (ours, theirs)]
    largest = max(abs(each) for each in extremes[0])
    apart = [abs(one - two) for one, two in zip((*sums[0], means[0]), (*sums[1], means[1]), strict=True)]
    beyond = [abs(one - two) for one, two in zip(*extremes, strict=True)]
    return bool(max(apart) <= allowed * size and max(beyond) <= _FARTHER * allowed * largest)
