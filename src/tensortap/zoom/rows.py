"""Aligns the operators of two traces in execution order, by their values first and by their names second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tensortap.core.operators import Operator, OperatorTrace
from tensortap.core.sequences import best_alignment

__all__ = ["Aligned", "align_operators"]

Aligned = tuple[Operator | None, Operator | None]
"""The reference's operator and the candidate's; None where a side has none."""

_SAME_VALUE = 4
_SAME_NAME = 2
_SAME_SHAPE = 1


def align_operators(
    reference: OperatorTrace, candidate: OperatorTrace, matched: Mapping[int, set[int]], moves: bool = False
) -> list[Aligned]:
    """Return all operators of both sides, in the alignment with the most equal operators.

    matched: the reference's values for each value of the candidate.
    moves: whether operators that only move elements take part.
    """
    rows: list[Aligned] = []
    for phase in ("forward", "backward"):
        theirs = [each for each in reference.operators if _takes_part(each, phase, moves)]
        ours = [each for each in candidate.operators if _takes_part(each, phase, moves)]
        rows += _align(theirs, ours, lambda one, two: _score(reference, candidate, matched, one, two))
    return rows


def _takes_part(operator: Operator, phase: str, moves: bool) -> bool:
    return operator.phase == phase and operator.part_of is None and (moves or not operator.moves)


def _score(
    reference: OperatorTrace,
    candidate: OperatorTrace,
    matched: Mapping[int, set[int]],
    theirs: Operator,
    ours: Operator,
) -> int:
    same = any(set(theirs.outputs) & matched.get(number, set()) for number in ours.outputs)
    score = _SAME_VALUE if same else 0
    if theirs.name == ours.name:
        score += _SAME_NAME
        if [reference.values[v].shape for v in theirs.outputs] == [candidate.values[v].shape for v in ours.outputs]:
            score += _SAME_SHAPE
    return score


def _align(
    theirs: Sequence[Operator], ours: Sequence[Operator], score: Callable[[Operator, Operator], int]
) -> list[Aligned]:
    scores = np.array([[score(one, two) for two in ours] for one in theirs], np.int64).reshape(len(theirs), len(ours))
    return [
        (None if one is None else theirs[one], None if two is None else ours[two])
        for one, two in best_alignment(scores)
    ]
