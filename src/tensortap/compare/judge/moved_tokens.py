"""Values whose tokens may be at other places, or be made at positions that a mask hides: these cannot be judged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortap.compare.judge.rules.evidence import Evidence
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.measure.hidden import EXTREMES_AGREE, FOLLOWS_HIDDEN, UNREAD_POSITIONS
from tensortap.compare.measure.token_order import LEAST_REORDERED, OTHER_ORDER

__all__ = ["MovedTokens"]

_FLOWING = ("input", "output", "grad_output", "grad_input")


class MovedTokens:
    """Finds such values among the pairs beyond their tolerance, in execution order."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._pairs = evidence.pairs
        self._structure = evidence.structure
        self._after_hidden: set[int] = set()
        """Rows whose elements may have been made at positions that a mask hides."""

    def doubt(self, row: int, sources: Sequence[int], tolerance: float) -> str:
        """Return why a value cannot be judged; empty if it can. What is made of it then inherits no error."""
        if self._follows_hidden(row, sources):
            self._after_hidden.add(row)
            why = FOLLOWS_HIDDEN
        elif self._is_in_other_order(row, tolerance):
            why = OTHER_ORDER
        else:
            return ""
        self._evidence.discount(row)
        return why

    def _follows_hidden(self, row: int, sources: Sequence[int]) -> bool:
        """Whether a value without axes of positions, such as the tokens of an expert, is made from one that differs at
        positions that a mask hides: these may be among its elements, or have moved the others to other places."""
        kind, limits = self._structure.kind[row], self._pairs.limits
        if self._pairs.isolated is not None or self._evidence.policy.fixed:
            return False
        if row in self._pairs.shown and not self._may_be_sorted(row):
            return False
        if row in self._pairs.masks or (self._pairs.reshaped[row] and row not in self._pairs.other_lengths):
            return False
        if kind in ("input", "output"):
            # Summaries show no positions: what still has some may be wrong at others.
            hidden = (UNREAD_POSITIONS, EXTREMES_AGREE)[: 1 + (not self._pairs.dimensions[row])]
            differ = [each for each in sources if each in self._after_hidden or limits.get(each) in hidden]
            return bool(differ) and not self._pairs.selects_other_rows(row, differ)
        call = self._structure.call_of(row) if kind in ("grad_output", "grad_input") else None
        return call is not None and not self._after_hidden.isdisjoint(call.of("input", "output"))

    def _is_in_other_order(self, row: int, tolerance: float) -> bool:
        """Whether a value inside code that was given choices has the same tokens in another order: experts may take
        them one by one, sorted or as they come. What that code returns is compared as usual."""
        structure = self._structure
        call = structure.call_of(row) if structure.kind[row] in _FLOWING else None
        apart = self._evidence.error[row] > LEAST_REORDERED and not self._evidence.policy.fixed
        around = call.parent if call is not None and apart else None
        while around is not None:
            if self._was_given_choices(around):
                return self._pairs.is_reordered(row, max(tolerance, self._pairs.base[row]))
            around = around.parent
        return False

    def _may_be_sorted(self, row: int) -> bool:
        """Whether a list of all tokens may have them in another order than positions have, as sorted by their experts.

        Then it belongs to a call inside one that was given choices. Whole tensors show whether it may be; from
        summaries, no order of tokens changes the norm, which differs by no more than hidden tokens do.
        """
        pairs, structure = self._pairs, self._structure
        call = structure.call_of(row)
        if call is None or call.parent is None or pairs.dimensions[row] != 2:
            return False
        if not self._was_given_choices(call.parent):
            return False
        if not np.isnan(pairs.mismatched[row]):
            return row in pairs.in_other_order
        ours, theirs = float(pairs.l2[row]) ** 2, float(pairs.candidate_l2[row]) ** 2
        return abs(ours - theirs) <= 2 * self._padded_share(structure.scope[row]) * max(ours, theirs)

    def _padded_share(self, scope: tuple[int, int, int]) -> float:
        """Return the share of positions that the masks hide which the model is given in a pass."""
        return max(
            (
                float(self._pairs.zeros[row] / self._pairs.elements[row])
                for row, kind in enumerate(self._structure.kind)
                if kind == "input" and not self._structure.module[row] and "mask" in self._structure.path[row]
                if self._structure.scope[row] == scope
            ),
            default=0.0,
        )

    def _was_given_choices(self, call: CallRows) -> bool:
        """Whether a module made integers that a call was given, as a router makes choices of experts."""
        structure = self._structure
        given = call.of("input")
        return any(structure.integers[each] and structure.makers.get(structure.tensor[each]) for each in given)
