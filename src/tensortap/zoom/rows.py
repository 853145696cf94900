"""Aligns the operators of two traces in execution order, by their values first and by their names second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tensortap.core.operators import Operator, OperatorTrace

__all__ = ["Aligned", "align_operators"]

Aligned = tuple[Operator | None, Operator | None]
"""The reference's operator and the candidate's; None where a side has none."""

_SAME_VALUE = 4
_SAME_NAME = 2
_SAME_SHAPE = 1
_LARGEST = 4_000_000
"""Cells of the table; longer traces are aligned in pieces."""


def align_operators(
    reference: OperatorTrace, candidate: OperatorTrace, matched: Mapping[int, set[int]], moves: bool = False
) -> list[Aligned]:
    """Return all operators of both sides, aligned so that as much as possible is the same.

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
    """Return the best alignment, by dynamic programming."""
    if len(theirs) * len(ours) > _LARGEST:
        half = len(theirs) // 2, len(ours) // 2
        return [*_align(theirs[: half[0]], ours[: half[1]], score), *_align(theirs[half[0] :], ours[half[1] :], score)]
    scores = np.zeros((len(theirs) + 1, len(ours) + 1), np.int64)
    pairs = np.array([[score(one, two) for two in ours] for one in theirs], np.int64).reshape(len(theirs), len(ours))
    for row in range(len(theirs) - 1, -1, -1):
        diagonal = np.where(pairs[row] > 0, pairs[row] + scores[row + 1, 1:], 0)
        best = np.maximum(diagonal, scores[row + 1, :-1])
        scores[row, :-1] = np.maximum.accumulate(best[::-1])[::-1]
    rows: list[Aligned] = []
    row = column = 0
    while row < len(theirs) and column < len(ours):
        here = pairs[row, column]
        if here > 0 and scores[row, column] == here + scores[row + 1, column + 1]:
            rows.append((theirs[row], ours[column]))
            row, column = row + 1, column + 1
        elif scores[row, column] == scores[row + 1, column]:
            rows.append((theirs[row], None))
            row += 1
        else:
            rows.append((None, ours[column]))
            column += 1
    return [*rows, *((each, None) for each in theirs[row:]), *((None, each) for each in ours[column:])]
