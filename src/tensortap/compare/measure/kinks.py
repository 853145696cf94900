"""Elements that crossed a kink: a ReLU's zero, a tie of a maximum, the edge of a clamp.

There a gradient jumps, however small the difference of the activation: it is zero on one side and not on the other. If
few elements did, and all others agree, no code is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.kernels import difference

__all__ = ["CrossedKink", "crossed_kink", "few_steps", "kinks_between"]

Array = npt.NDArray[Any]
_FEW = 4
"""Elements that may differ without being zero on a side: overlapping windows of a pooling add several gradients."""

_LEAST_OF_PARAMETERS = 8 * _FEW
"""Elements of a parameter's gradient of which few may differ. Each sums over all positions, so that one position that
crossed a kink moves one element of a vector."""
_SHARE_OF_STEPS = 1 / 256
"""Share of a parameter's elements whose gradient may be nearly zero, as under an input that is constant."""
_MOST_STEPS = 1 / 8
"""The largest such share of a short vector: a wrong optimizer moves all elements."""
_DOMINANT = 100.0
"""Share of the difference that these must have in comparison with all others."""


@dataclass(frozen=True)
class CrossedKink:
    """A pair without the elements that crossed a kink."""

    crossed: int
    """Their number; from sketches, the number of sums that they are in."""
    elements: int
    rel_l2: float
    """The error of all others."""
    row_rel_l2: float
    """The error of the worst row of all others; NaN if it is not known."""
    exact: bool
    outliers: int = 0
    """How many of them are zero on neither side."""


def few_steps(elements: int) -> int:
    """Return how many elements of a parameter may take another step, because their gradient is nearly zero."""
    return max(min(_FEW, int(elements * _MOST_STEPS)), int(elements * _SHARE_OF_STEPS))


def crossed_kink(ours: Array, theirs: Array, least: int = 64 * _FEW, few: int = _FEW) -> CrossedKink | None:
    """Return how a pair differs without the elements that are zero on one side alone; None if there are none.

    If these do not explain the difference, the `few` elements that differ most are left out as well, in tensors of more
    than `least` elements.
    """
    if few < 1:
        return None
    ours, theirs = (array.astype(np.float64) for array in (ours, theirs))
    crossed = (ours == 0) != (theirs == 0)
    count = int(np.count_nonzero(crossed))
    apart = np.where(crossed, 0.0, np.abs(ours - theirs))
    outliers = np.zeros_like(crossed)
    if apart.size > least:
        worst = np.argpartition(apart.reshape(-1), -few)[-few:]
        squares = np.square(apart.reshape(-1))
        rest = (squares.sum() - squares[worst].sum()) / apart.size
        if squares[worst].sum() > _DOMINANT * rest * apart.size:
            outliers.reshape(-1)[worst] = squares[worst] > 64 * rest
    left_out = crossed | outliers
    if not left_out.any():
        return None
    size = float(np.linalg.norm(ours.reshape(-1)))
    rest = difference(np.where(left_out, 0.0, ours), np.where(left_out, 0.0, theirs), size=size).difference
    relative = rest.l2 / size if size else np.inf
    found = int(np.count_nonzero(outliers))
    return CrossedKink(count + found, ours.size, relative, rest.row_rel_l2, True, found)


def kinks_between(reference: Side, candidate: Side, alignment: Alignment) -> Callable[[int], CrossedKink | None]:
    """Return a function of a pair that tells which of its elements crossed a kink."""

    def of_pair(pair: int) -> CrossedKink | None:
        left, right = int(alignment.reference[pair]), int(alignment.candidate[pair])
        few = few_steps(int(reference.elements[left])) if reference.kind[left] == "param" else _FEW
        if reference.kept[left] and candidate.kept[right]:
            least = {"param_grad": _LEAST_OF_PARAMETERS, "param": 0}.get(reference.kind[left], 64 * _FEW)
            return crossed_kink(reference.array(left), candidate.array(right), least, few)
        if candidate.reordered[right]:
            return None
        if not reference.has_sketch[left] or not candidate.has_sketch[right]:
            return None
        size = min(reference.sketch_size, candidate.sketch_size)
        ours, theirs = (
            side.sketches_at(np.array([row]), size)[0] for side, row in ((reference, left), (candidate, right))
        )
        apart = ours.astype(np.float64) - theirs
        zeros = abs(int(reference.zeros[left]) - int(candidate.zeros[right]))
        return _from_sketch(apart, float(reference.l2[left]), int(reference.elements[left]), zeros, few)

    return of_pair


def _from_sketch(apart: Array, size: float, elements: int, zeros: int, few: int) -> CrossedKink | None:
    """Leave out the sums that differ most: an element that crossed a kink is in one of them."""
    few = max(_FEW, min(few, apart.size // 8))
    if not np.isfinite(apart).all() or not size or zeros > _FEW:
        return None
    squares = np.sort(np.square(apart))[::-1]
    rest = squares[few:].sum() * squares.size / (squares.size - few)
    crossed = int(np.count_nonzero(squares[:few] > 64 * rest / squares.size))
    return CrossedKink(crossed, elements, float(np.sqrt(rest)) / size, float("nan"), False) if crossed else None
