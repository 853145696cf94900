"""Differences that nothing reads: at positions that a mask hides.

A mask may hide all elements from a position, as it does from padding in front of a causal text. What attention makes of
that position depends on the convention: the mean of everything, or zero. Padding itself is a token whose embedding is
nearly zero; after an optimizer's step it consists of noise, and a norm enlarges it. If no gradient of any parameter
depends on such a position, the loss reads none of it, and no code is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.masked_calls import precedes_attention
from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.rules.margins import MOST_ASSUMED
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.structure import Structure
from tensortap.compare.measure.hidden import UNREAD_POSITIONS
from tensortap.core.records import WRONG_STATUSES, Finding

__all__ = ["UNREAD", "UNREAD_PADDING", "UNREAD_ROUGHLY", "UnreadDifferences", "find_unread"]

UNREAD = "it differs beside a mask in another convention, and no gradient of a parameter depends on it"
UNREAD_PADDING = "it differs beside a mask that hides padding, and no gradient of a parameter depends on it"
UNREAD_ROUGHLY = "it differs beside a mask that hides positions, and gradients are too rough to show what depends on it"
AGREES = "no difference of the forward pass reaches it"
_FORWARD = ("input", "output")
_AFTER_BACKWARD = ("param", "buffer", "step_grad")
_LEAST_GRADIENTS = 8
_FIRST = 2
_AGREES, _MOST_OFF = 64.0, 2.0**-5
"""Times its own rounding that a weight's gradient may be off: a sum over all positions rounds 4 times as much as a
layer, and passes on 16 times the rounding of layers before. But never more than 4 epsilons of bfloat16, which is one
sum's own rounding: a difference that the loss reads may be as small as the rest of what 64 of them allow."""
_LEAST_SHOWN = 0.5
"""Share of positions that a mask of the attention alone leaves; where the model was given one, it tells."""
_ROUNDED_APART = 1 / 8
"""Share of the other elements that may be further apart than the usual rounding of a single element."""
_SHORT = 2.0**-10
"""The least rounding of a short dtype."""
_AS_BEFORE = 2.0
"""Times that it may be further off than in an earlier step without any difference of that kind."""


@dataclass(frozen=True)
class UnreadDifferences:
    """Wrong rows of forward passes that nothing reads."""

    rows: frozenset[int] = field(default_factory=frozenset)
    why: str = UNREAD
    agreeing: frozenset[int] = field(default_factory=frozenset)
    """The rows among these that are gradients of parameters: these agree."""

    def without(self, judgement: Judgement) -> Judgement:
        """Return the judgement with these rows unjudged."""
        if not self.rows:
            return judgement
        status, rule = list(judgement.status), list(judgement.rule)
        for row in self.rows:
            status[row], rule[row] = ("close", AGREES) if row in self.agreeing else ("unjudged", self.why)
        born = [row for row in judgement.born if row not in self.rows]
        return replace(judgement, status=status, rule=rule, born=born)


def find_unread(
    judgement: Judgement,
    pairs: Pairs,
    structure: Structure,
    policy: Policy,
    births: Iterable[Finding],
    cut: bool = False,
    untied: Collection[tuple[str, str]] = (),
) -> UnreadDifferences:
    """Return the wrong rows up to the first mistake of an optimizer, if all began in forward passes with a mask, and
    nothing reads them.

    Gradients on the way may be off by more than rounding, as all that follows something wrong is judged; those of the
    parameters, where they end, may not.

    cut: whether a gradient is missing. Then only the first gradients of a backward are asked, which depend on all of
    its forward, and only differences of the forward are left unread.
    untied: parameters that are tied on one side alone. Their gradients differ for that reason, and say nothing.
    """
    where = judgement.having(*WRONG_STATUSES)
    apart = _gradients_of(untied, structure)
    where[list(apart)] = False
    births, last = _until_optimizer(list(births), structure, apart)
    rows = [birth.row for birth in births if birth.row is not None]
    if any(_is_given(row, structure) or _is_padding_mask(row, pairs, structure) for row in rows):
        return UnreadDifferences()
    if last is not None:
        where &= np.array([scope[1] <= last for scope in structure.scope], bool)
        where &= np.array([kind not in _AFTER_BACKWARD for kind in structure.kind], bool)
    if cut:
        where &= np.array([kind in _FORWARD for kind in structure.kind], bool)
        births = [birth for birth in births if birth.row is not None and structure.kind[birth.row] in _FORWARD]
    if any(birth.row is not None and structure.kind[birth.row] == "param_grad" for birth in births):
        return UnreadDifferences()
    reshaped = pairs.reshaped.copy()
    reshaped[list(pairs.other_lengths)] = False  # hidden positions among the tokens of an expert
    if not where.any() or (where & (reshaped | pairs.nonfinite)).any():
        return UnreadDifferences()
    wrong = np.flatnonzero(where).tolist()
    scopes = {structure.scope[row] for row in wrong if structure.kind[row] in _FORWARD}
    if not scopes:
        return UnreadDifferences()
    why = _explain(births, pairs, structure, scopes)
    if not why:
        return UnreadDifferences()
    gradients = [
        row
        for row, kind in enumerate(structure.kind)
        if kind == "param_grad" and row not in apart and (last is None or structure.scope[row][1] <= last)
    ]
    if cut:
        gradients = _first_of_backward(gradients, pairs, structure)
    if len(gradients) < (1 if cut else _LEAST_GRADIENTS) or not scopes <= {structure.scope[row] for row in gradients}:
        return UnreadDifferences()
    known = _right_before([row for row in gradients if not where[row]], pairs, structure, scopes)
    # In a short dtype, rounding moves choices of experts. A token with another expert moves gradients by any amount.
    chosen = any(structure.integers[row] and structure.kind[row] == "output" for row in wrong)
    most = float("inf") if chosen else MOST_ASSUMED
    if any(birth.row in pairs.masks for birth in births):
        most = 0.0  # rounding moves no mask: where one hides something else, gradients that differ are no rounding
    for row in gradients:
        before = known.get(_parameter(row, structure), 0.0)
        if pairs.dimensions[row] > 1 and not _agrees(row, pairs, policy, before):
            if why != UNREAD_ROUGHLY and pairs.base.max() >= _SHORT and pairs.error[row] <= most:
                why = UNREAD_ROUGHLY
            elif why != UNREAD_ROUGHLY or not pairs.error[row] <= most:
                return UnreadDifferences()
    if why == UNREAD_ROUGHLY:
        return UnreadDifferences(frozenset(wrong), why)
    agreeing = frozenset(row for row in wrong if structure.kind[row] == "param_grad" and pairs.dimensions[row] > 1)
    return UnreadDifferences(frozenset(wrong), why, agreeing)


def _explain(births: Collection[Finding], pairs: Pairs, structure: Structure, scopes: set[tuple[int, int, int]]) -> str:
    """Return why all births may differ at positions that nothing reads; empty if one is not explained.

    Only what is made from a mask depends on its convention. Padding differs after a step of the optimizer, which moves
    its embedding: not at the start.
    """
    alike = [row for row, mask in pairs.masks.items() if mask.frees_positions]
    given = {structure.module[row] for row in alike}
    follows = scopes <= _with_hidden_positions(pairs, structure)
    beside_masks, padded = scopes <= {structure.scope[row] for row in alike}, _padded(pairs, structure)
    reason = UNREAD if alike else UNREAD_PADDING
    why = "" if births or not (follows or beside_masks) else reason
    for birth in births:
        if birth.row is None:
            return ""
        by_mask = birth.row not in pairs.shown and (follows or (beside_masks and birth.module in given))
        by_mask = by_mask and not precedes_attention(birth.row, pairs, structure)
        by_padding = structure.scope[birth.row] in padded and not structure.is_at_start(birth.row)
        if not (by_mask or by_padding):
            return ""
        if not (by_mask and follows) and not _only_hidden(birth.row, pairs, structure):
            return ""
        why = reason if by_mask else why or UNREAD_PADDING
    return why


def _is_padding_mask(row: int, pairs: Pairs, structure: Structure) -> bool:
    """Whether a row has a 0 or a 1 for each token: it says what is hidden, and nothing that is hidden has made it."""
    if structure.kind[row] not in _FORWARD or pairs.base[row] or pairs.dimensions[row] != 2:
        return False
    return bool(len(pairs.l1) and pairs.l1[row] == round(float(pairs.l2[row]) ** 2))


def _is_given(row: int, structure: Structure) -> bool:
    """Whether a row is a parameter or a buffer before the first step: nothing that a mask hides has made it."""
    return structure.kind[row] in ("param", "buffer") and not structure.number[row] and structure.is_at_start(row)


def _gradients_of(parameters: Collection[tuple[str, str]], structure: Structure) -> set[int]:
    if not parameters:
        return set()
    spots = zip(structure.kind, structure.module, structure.path, strict=True)
    return {row for row, (kind, *spot) in enumerate(spots) if kind == "param_grad" and tuple(spot) in parameters}


def _until_optimizer(
    births: list[Finding], structure: Structure, apart: Collection[int]
) -> tuple[list[Finding], int | None]:
    """Return the births before the first one of an optimizer, and its step; None if there is none.

    What an optimizer does wrong is seen after the backward of its step, whatever differed before and is not read. So
    is what it makes of gradients that stand `apart`.
    """
    rows = [birth.row for birth in births if birth.row is not None and structure.kind[birth.row] in _AFTER_BACKWARD]
    after = [structure.scope[row][1] for row in rows if structure.kind[row] == "step_grad" or structure.number[row]]
    after += [structure.scope[birth.row][1] for birth in births if birth.row in apart and birth.row is not None]
    if not after:
        return births, None
    last = min(after)
    before = [
        birth
        for birth in births
        if birth.row is not None
        and birth.row not in apart
        and structure.scope[birth.row][1] <= last
        and structure.kind[birth.row] not in _AFTER_BACKWARD
    ]
    return before, last


def _first_of_backward(gradients: list[int], pairs: Pairs, structure: Structure) -> list[int]:
    """Return for each forward pass the gradients of the matrices that its backward reached first."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for row in gradients:
        if pairs.dimensions[row] > 1:
            found.setdefault(structure.scope[row], []).append(row)
    return [row for rows in found.values() for row in sorted(rows, key=structure.seq.__getitem__)[:_FIRST]]


def _only_hidden(row: int | None, pairs: Pairs, structure: Structure) -> bool:
    """Whether no more elements of a birth differ than there are at hidden positions, as far as its elements are known.

    An isolated check knows them. There, gradients of other modules say nothing: they come from the reference.
    """
    if row is None:
        return False
    share = float(pairs.mismatched[row])
    if share != share:
        return pairs.isolated is None
    masks = [
        1 - float(pairs.zeros[each] / pairs.elements[each])
        for each, kind in enumerate(structure.kind)
        if kind == "input" and not structure.module[each] and "mask" in structure.path[each]
        if structure.scope[each] == structure.scope[row] and pairs.zeros[each]
    ]
    shown = min(masks, default=_LEAST_SHOWN)
    return share <= 1 - shown + _ROUNDED_APART * shown


def _with_hidden_positions(pairs: Pairs, structure: Structure) -> set[tuple[int, int, int]]:
    """Return the forward passes of a free run in which something differs at hidden positions alone: what is made from
    it may have other axes, as the tokens of an expert."""
    if pairs.isolated is not None:
        return set()
    return {structure.scope[row] for row, why in pairs.limits.items() if why == UNREAD_POSITIONS}


def _padded(pairs: Pairs, structure: Structure) -> set[tuple[int, int, int]]:
    """Return the forward passes whose model was given a mask that hides something."""
    return {
        structure.scope[row]
        for row, kind in enumerate(structure.kind)
        if kind == "input" and not structure.module[row] and "mask" in structure.path[row] and pairs.zeros[row]
    }


def _agrees(row: int, pairs: Pairs, policy: Policy, before: float) -> bool:
    """Whether a gradient is off by no more than rounding, measured noise, or the same gradient in an earlier step."""
    measured = 0.0 if policy.noise is None else float(policy.noise[row])
    # Under autocast, a float32 gradient is made from short numbers.
    allowed = min(_AGREES * float(pairs.base.max()), _MOST_OFF)
    return bool(pairs.error[row] <= max(allowed, measured, _AS_BEFORE * before))


def _right_before(
    gradients: Iterable[int], pairs: Pairs, structure: Structure, scopes: set[tuple[int, int, int]]
) -> dict[tuple[int, str, str], float]:
    """Return by parameter the worst error of its right gradients before the first step with a difference."""
    first = min(step for _, step, _ in scopes)
    found: dict[tuple[int, str, str], float] = {}
    for row in gradients:
        if structure.scope[row][1] < first:
            key = _parameter(row, structure)
            found[key] = max(found.get(key, 0.0), float(pairs.error[row]))
    return found


def _parameter(row: int, structure: Structure) -> tuple[int, str, str]:
    return structure.scope[row][0], structure.module[row], structure.path[row]
