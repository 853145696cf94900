"""Numbers beyond the range of one side's dtype: where they become Inf or NaN, no code has to be wrong.

float16 ends at 65,504. What float32 holds without loss is Inf there, and all that is made from it. The same happens in
float32 where a training blows up: the side that rounds up overflows first. The numbers of the finite side show it: they
are at the end of the other side's range, or their squares are beyond it. From there on, nothing can be judged. A NaN
that the numbers do not explain is wrong as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.structure import Structure
from tensortap.core import dtypes
from tensortap.core.records import WRONG_STATUSES, Finding

__all__ = ["OVERFLOWS", "find_overflows"]

OVERFLOWS = "one side's numbers are beyond the range of the other side's dtype"
_NEAR = 2.0
"""Factor by which numbers may be below the end of the range and overflow on the other side: it may add before."""
_DROWNED = 1.0
"""Relative error of what came in from which on the sizes of the two sides say nothing about each other."""


def find_overflows(
    judgement: Judgement,
    structure: Structure,
    born: Sequence[Finding],
    reference: Side,
    candidate: Side,
    alignment: Alignment,
    isolated: bool = False,
) -> tuple[Judgement, list[Finding]]:
    """Return the judgement without pairs that overflow on one side, nor what follows from these; and the other births.

    isolated: every module ran on the reference's own inputs, so that nothing follows.
    """
    explained = [birth for birth in born if _is_explained(birth, judgement, structure, reference, candidate, alignment)]
    if not explained:
        return judgement, list(born)
    rows = {birth.row for birth in explained}
    others = [birth for birth in born if birth.row not in rows]
    at = min(_place(birth.row, structure) for birth in explained if birth.row is not None)
    if isolated:  # an optimizer uses the gradients of all modules
        modules = {birth.module for birth in explained}
        others = [birth for birth in others if birth.module not in modules and not _is_state(birth, at, structure)]
    else:
        others = [birth for birth in others if birth.row is None or _place(birth.row, structure) < at]
    left = {birth.row for birth in others}
    wrong = np.flatnonzero(judgement.having(*WRONG_STATUSES)).tolist()
    follow = [row for row in wrong if row not in left and (not others or row in rows)]
    status, rule = list(judgement.status), list(judgement.rule)
    for row in follow:
        status[row], rule[row] = "unjudged", OVERFLOWS
    return replace(judgement, status=status, rule=rule, born=[row for row in judgement.born if row in left]), others


def _is_state(birth: Finding, at: tuple[int, int], structure: Structure) -> bool:
    """Whether a birth is one of the optimizer's, after an overflow at a place."""
    return birth.row is not None and birth.key.phase == "state" and structure.scope[birth.row][1] >= at[0]


def _place(row: int, structure: Structure) -> tuple[int, int]:
    return structure.scope[row][1], structure.seq[row]


def _is_explained(
    birth: Finding,
    judgement: Judgement,
    structure: Structure,
    reference: Side,
    candidate: Side,
    alignment: Alignment,
) -> bool:
    """Whether a birth is not finite on one side alone, and the numbers of the other side explain it."""
    row = birth.row
    if row is None or judgement.status[row] != "nonfinite":
        return False
    sides = (reference, int(alignment.reference[row])), (candidate, int(alignment.candidate[row]))
    counts = [int(side.nan[at] + side.posinf[at] + side.neginf[at]) for side, at in sides]
    if counts[0] == counts[1]:
        return False
    if birth.inputs_rel_l2 >= _DROWNED:
        return True
    broken, finite = (sides[1][0], sides[0][0]) if counts[1] > counts[0] else (sides[0][0], sides[1][0])
    rows = {id(reference): alignment.reference, id(candidate): alignment.candidate}
    at, other = rows[id(broken)], rows[id(finite)]
    end = dtypes.edge_of(broken.dtype[int(at[row])])
    given = [each for each in structure.sources(row) if each < row and not finite.edge[int(other[each])]]  # no masks
    for source in (row, *given):
        size, own = _size(finite, int(other[source])), dtypes.edge_of(broken.dtype[int(at[source])])
        if size >= own / _NEAR or size**2 >= end:
            return True
    return False


def _size(side: Side, row: int) -> float:
    """Return the largest magnitude of a record."""
    sizes = [abs(float(side.min[row])), abs(float(side.max[row]))]
    return max((size for size in sizes if size < float("inf")), default=0.0)
