"""Gradients that a module does not pass on: at zeros of a ReLU, whatever came in is dropped.

A maximum over zeros has many right gradients: one of the zeros gets all of it, or each a part. Two implementations
differ there, and no code is wrong: the module before drops all of it, and its own gradients agree.

A compiled layer may read what it returns: the share of its own code arrives inside the graph, and its gradients agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.structure import Structure
from tensortap.core.records import RIGHT_STATUSES, WRONG_STATUSES, Finding
from tensortap.kernels import difference
from tensortap.kernels.pairs.reference import PairMeasure

__all__ = ["UNPASSED", "find_unpassed", "measure_passed"]

UNPASSED = "it differs where its module passes nothing on, as at the zeros of a ReLU"


def find_unpassed(
    judgement: Judgement, structure: Structure, born: Sequence[Finding]
) -> tuple[Judgement, list[Finding]]:
    """Return the judgement without gradients of outputs whose modules pass on what is right, and the other births."""
    rows = {birth.row for birth in born if birth.row is not None and _passes_right(birth.row, judgement, structure)}
    if not rows:
        return judgement, list(born)
    tensors = {structure.tensor[row] for row in rows}
    wrong = np.flatnonzero(judgement.having(*WRONG_STATUSES)).tolist()
    same = [row for row in wrong if structure.kind[row] == "grad_output" and structure.tensor[row] in tensors]
    status, rule = list(judgement.status), list(judgement.rule)
    for row in (*rows, *same):
        status[row], rule[row] = "unjudged", UNPASSED
    left = [row for row in judgement.born if row not in rows]
    return replace(judgement, status=status, rule=rule, born=left), [birth for birth in born if birth.row not in rows]


def _passes_right(row: int, judgement: Judgement, structure: Structure) -> bool:
    """Whether a row is the gradient of an output that differs, and all that its module makes of it agrees."""
    if structure.kind[row] != "grad_output" or judgement.status[row] != "diverged":
        return False
    call = structure.call_of(row)
    if call is None or call.children:
        return False
    own = structure.own_gradients.get((structure.scope[row], structure.module[row]), [])
    inside = [each for each in structure.held_inside(call) if structure.kind[each] == "param_grad"]
    made = [*call.of("grad_input"), *own, *inside]
    found = {judgement.status[each] for each in made}
    return not found.isdisjoint(RIGHT_STATUSES) and found.isdisjoint(WRONG_STATUSES)


def measure_passed(output: npt.NDArray[Any], ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> PairMeasure | None:
    """Measure two gradients of an output where it is not zero; None if it is zero nowhere, or everywhere."""
    where = output == 0
    if output.shape != ours.shape or ours.shape != theirs.shape or where.all() or not where.any():
        return None
    return difference(*(np.where(where, np.zeros((), each.dtype), each) for each in (ours, theirs)))
