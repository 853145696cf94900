"""Differences that nothing reads, beside a mask in another convention.

A mask may hide all elements from a position, as it does from padding in front of a causal text. What attention makes of
that position depends on the convention: the mean of everything, or zero. If no gradient of any parameter depends on it,
the loss reads none of it, and no code is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tensortap.compare.judge.judging import Judgement
from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.structure import Structure
from tensortap.core.records import WRONG_STATUSES, Finding

__all__ = ["UNREAD", "UnreadDifferences", "find_unread"]

UNREAD = "it differs beside a mask in another convention, and no gradient of a parameter depends on it"
_FORWARD = ("input", "output")
_LEAST_GRADIENTS = 8
_AGREES, _MOST_OFF = 64.0, 2.0**-5
"""Times its own rounding that a weight's gradient may be off: a sum over all positions rounds 4 times as much as a
layer, and passes on 16 times the rounding of layers before. But never more than 4 epsilons of bfloat16, which is one
sum's own rounding: a difference that the loss reads may be as small as the rest of what 64 of them allow."""


@dataclass(frozen=True)
class UnreadDifferences:
    """Wrong rows of forward passes that nothing reads."""

    rows: frozenset[int] = field(default_factory=frozenset)

    def without(self, judgement: Judgement) -> Judgement:
        """Return the judgement with these rows unjudged."""
        if not self.rows:
            return judgement
        status, rule = list(judgement.status), list(judgement.rule)
        for row in self.rows:
            status[row], rule[row] = "unjudged", UNREAD
        born = [row for row in judgement.born if row not in self.rows]
        return replace(judgement, status=status, rule=rule, born=born)


def find_unread(
    judgement: Judgement, pairs: Pairs, structure: Structure, births: Iterable[Finding]
) -> UnreadDifferences:
    """Return the wrong rows, if all are of forward passes with a mask in another convention, and nothing reads them."""
    if not any(mask.words[0] != mask.words[1] and not mask.differing for mask in pairs.masks.values()):
        return UnreadDifferences()
    wrong = [row for row, status in enumerate(judgement.status) if status in WRONG_STATUSES]
    if not wrong or any(structure.kind[row] not in _FORWARD or pairs.reshaped[row] for row in wrong):
        return UnreadDifferences()
    alike = [row for row, mask in pairs.masks.items() if mask.words[0] != mask.words[1] and not mask.differing]
    given = {structure.module[row] for row in alike}
    if any(birth.key.kind not in _FORWARD or birth.module not in given for birth in births):
        return UnreadDifferences()  # only what is made from a mask depends on its convention
    masked = {structure.scope[row] for row in alike}
    gradients = [row for row, kind in enumerate(structure.kind) if kind == "param_grad"]
    weights = [row for row in gradients if pairs.dimensions[row] > 1]
    agree = all(pairs.error[row] <= min(_AGREES * pairs.base[row], _MOST_OFF) for row in weights)
    scopes = {structure.scope[row] for row in wrong}
    counted = {structure.scope[row] for row in gradients}
    if len(gradients) < _LEAST_GRADIENTS or not agree or not scopes <= masked & counted:
        return UnreadDifferences()
    return UnreadDifferences(frozenset(wrong))
