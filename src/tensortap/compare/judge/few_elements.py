"""Pairs that are right but for few elements: an activation crossed a kink there, or an optimizer took another step."""

from __future__ import annotations

from collections.abc import Sequence

from tensortap.compare.judge.rules.evidence import Evidence, JudgedPair
from tensortap.compare.measure.kinks import CrossedKink, few_steps

__all__ = ["FewElements"]

_FEW_CROSSED, _SHARE_CROSSED = 4, 16.0
"""Elements of a gradient that may cross a kink whatever the activations; and per error of these and element."""
_LEAST_ELEMENTS = 64
"""Elements of a gradient of which one may be all that differs."""
_MOST_STEPS = 4.0
"""Times the usual step of an optimizer by which an element may be off: two steps, each of twice the usual size."""
_FLIPPED = 2.5
"""The same of a step that went the other way, which is twice the usual one if all steps are of one size."""


class FewElements:
    """Finds such pairs among those that are beyond their tolerance and have no wrong source."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._pairs = evidence.pairs
        self._structure = evidence.structure
        self.kinks: dict[int, CrossedKink] = {}
        """Rows that are right but for few elements that crossed a kink."""

    def crossed_a_kink(self, row: int, sources: Sequence[int], tolerance: float) -> bool:
        """Whether a gradient is right but for few elements, which crossed a kink of an activation.

        With activations that are off by e, about a share of e of them does.
        """
        evidence, kind = self._evidence, self._structure.kind[row]
        inside = kind == "param_grad" and self._structure.module[row] in self._pairs.including_activation
        if not (kind in ("grad_output", "grad_input") or inside) or evidence.policy.fixed:
            return False
        kink = self._pairs.kink_of(row)
        if kink is None:
            return self._is_one_element(row, tolerance)
        pair = JudgedPair(evidence, row, sources, 0.0)
        errors = [evidence.propagated[source] for source in pair.right_activations if evidence.is_known(source)]
        if self._pairs.isolated is not None:  # they have no error but that of a cast
            cast = [source for source in pair.right_activations if self._pairs.isolated.cast[source]]
            errors += [evidence.base[source] / 4 for source in cast]  # the mean rounding is a quarter of an epsilon
        worst = max((error for error in errors if error < float("inf")), default=0.0)
        allowed = _FEW_CROSSED + _SHARE_CROSSED * worst * kink.elements
        row_error = kink.row_rel_l2 / float(self._pairs.row_gain[row])
        if kink.crossed > min(allowed, kink.elements / 8) or not (kink.rel_l2 <= tolerance):
            return False
        if row_error > tolerance:
            return False
        self.kinks[row] = kink
        return True

    def _is_one_element(self, row: int, tolerance: float) -> bool:
        """Whether one element of a small gradient is all that differs: an activation that passes something on either
        side of its kink, as a PReLU, is zero on none."""
        apart, most = float(self._pairs.distance[row]), self._pairs.most_apart_of(row)
        if not (0 < most <= apart) or int(self._pairs.elements[row]) < _LEAST_ELEMENTS:
            return False
        rest = max(0.0, apart**2 - most**2) ** 0.5
        return bool(rest <= tolerance * self._evidence.l2[row] and rest <= most / 2)

    def took_other_steps(self, row: int, sources: Sequence[int], tolerance: float) -> bool:
        """Whether few elements of a parameter took another step and all others agree.

        Where a gradient is nearly zero, its rounding decides the step of an optimizer that divides by its size. An
        element is then off by at most two steps. A wrong optimizer moves all of them.
        """
        evidence = self._evidence
        if self._structure.kind[row] != "param" or evidence.policy.fixed or self._pairs.is_set_differently(row):
            return False
        if not evidence.optimizer.noise(row, sources) or any(evidence.wrong[source] for source in sources):
            return False
        gradients = [source for source in sources if self._structure.kind[source] in ("param_grad", "step_grad")]
        still = min((int(self._pairs.zeros[source]) for source in gradients), default=0)  # these hardly move
        moved = max(1, int(self._pairs.elements[row]) - still)
        step = evidence.step_size(row) * evidence.l2[row] / moved**0.5
        apart = float(self._pairs.distance[row])
        if self._pairs.most_apart_of(row) <= _MOST_STEPS * step and apart <= tolerance * evidence.l2[row]:
            return True  # one element is much of a short row
        few = self._pairs.kink_of(row)
        if few is None or few.crossed > few_steps(int(self._pairs.elements[row])):
            return False
        return bool(few.rel_l2 <= tolerance and apart <= _FLIPPED * step * few.crossed**0.5)
