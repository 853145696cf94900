"""Evidence in a summary about elements that no mask hides, beside hidden ones that differ anyway.

Positions are not part of a summary. But the largest and the smallest element are single elements, most of them at
positions that are shown. If one side alone has zeros at hidden positions, the norms of both sides say how much differs
there. In small tensors, some sums of the sketch contain no hidden element. All of this is put in numbers: logarithms of
how many times likelier it is after a mistake than before one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tensortap.compare.measure.ranges import Range, SideNorm

__all__ = ["ShownElements", "Sign", "rounded_extreme"]

_AGREES = 4.0
"""Times the rounding of a record that its largest element may be off."""
_ENOUGH = 0.9
"""Share of the sums without hidden elements that must agree: rounding may move single ones further."""
_DEVIATIONS = 4.0
"""Standard deviations that a squared difference, which a sketch estimates, may be off."""
_NEAR = 0.1
"""How far the share of zeros may be from that of positions that see nothing, relative to it."""


class _Weights(NamedTuple):
    """The weight of an extreme as evidence: if it agrees; differs; differs and may be hidden; differs and is shown."""

    agrees: float
    differs: float
    maybe_hidden: float
    certainly_shown: float = 4.0


_USUAL = _Weights(-0.85, 1.6, 0.95)
"""Before a mistake, an extreme agrees in 7 of 8 cases: in the eighth, it is at a hidden position. After it, 3 of 8
agree: they are at positions that the mistake does not reach."""
_OF_ATTENTION = _Weights(-0.45, 2.1, 1.4)
"""Attention returns small values at hidden positions, so extremes agree in 19 of 20 cases before. After, 3 of 5 agree:
the first position of a causal text is large, since it sees only itself, and hardly any mistake reaches it."""
_NORM_FITS, _NORM_DIFFERS = -0.5, 6.0
_TOO_LARGE = 3.0
_CERTAIN = 20.0


class Sign(NamedTuple):
    """The evidence of a record about its elements at positions that are not hidden."""

    weight: float
    """How much it speaks for a mistake at, or before, the record; negative if against one."""
    certain: bool = False


@dataclass(frozen=True)
class ShownElements:
    """Weighs what the summaries of each pair show."""

    ranges: Callable[[int], tuple[Range, Range]]
    """Smallest and largest element of a pair's two sides."""
    agreeing: Callable[[int, float], float | None]
    """Which share of the sums without hidden elements agrees, of a pair with some rounding; None if not known."""
    hidden: float
    """The share of hidden positions, as far as it is known."""
    norms: Callable[[int], tuple[SideNorm, SideNorm] | None]
    """Norm and zeros of a pair's two sides; None of one without positions, as tokens in the order of experts."""
    sums: int = 256
    """Number of sums of a sketch."""
    blind: float = 0.0
    """The share of positions that see nothing, where one side alone has zeros; 0 if it has not."""
    bounds: frozenset[float] = field(default_factory=frozenset)
    """Values that an activation cannot exceed: as an extreme, they say nothing."""

    def sign(self, row: int, error: float, rounding: float, made_by_attention: bool) -> Sign:
        """Return what a pair with some error and rounding says."""
        share = self.agreeing(row, rounding)
        if share is not None:
            return Sign(-_CERTAIN if share >= _ENOUGH else _CERTAIN, True)
        zeros = self._side_with_zeros(row)
        weight = self._of_extremes(row, rounding, _OF_ATTENTION if made_by_attention else _USUAL, zeros)
        if zeros is not None and error:
            weight += _NORM_FITS if self._norm_fits(row, error) else _NORM_DIFFERS
        # What attention makes of hidden positions is a mean, or zero: no larger than elsewhere.
        if made_by_attention and error > 2 * self.hidden**0.5:
            weight += _TOO_LARGE
        return Sign(weight)

    def zeros_apart(self, row: int) -> float:
        """Return by how much the shares of zeros differ; positive if the candidate has more."""
        norms = self.norms(row)
        return 0.0 if norms is None else norms[1].zeros - norms[0].zeros

    def _side_with_zeros(self, row: int) -> int | None:
        """Return which side has zeros at positions that see nothing, 0 or 1; None if it is not known."""
        apart = self.zeros_apart(row)
        if not self.blind or abs(abs(apart) - self.blind) > _NEAR * self.blind:
            return None
        return int(apart > 0)

    def _of_extremes(self, row: int, rounding: float, weights: _Weights, zeros: int | None) -> float:
        sides = self.ranges(row)
        size = max(abs(each) for side in sides for each in side)
        weight = 0.0
        for both in zip(*sides, strict=True):
            if abs(both[0] - both[1]) <= _AGREES * rounding * size:
                weight += 0.0 if rounded_extreme(both[0]) in self.bounds else weights.agrees
            elif zeros is None:
                weight += weights.differs
            else:  # a hidden element is an extreme only of the side that has no zeros there
                larger = abs(both[zeros]) > abs(both[1 - zeros])
                weight += weights.certainly_shown if larger else weights.maybe_hidden
        return weight

    def _norm_fits(self, row: int, error: float) -> bool:
        """Whether the squared difference is that of the squared norms: so it is if one side has zeros at all positions
        that differ."""
        norms = self.norms(row)
        assert norms is not None, "it has zeros at some positions"
        ours, theirs = norms
        apart = abs(ours.norm**2 - theirs.norm**2)
        return bool(abs(apart / (error * ours.norm) ** 2 - 1) <= _DEVIATIONS * (2 / self.sums) ** 0.5)


def rounded_extreme(value: float) -> float:
    """Round an extreme, so that those of two modules can be found to be the same."""
    return float(f"{value:.4g}")
