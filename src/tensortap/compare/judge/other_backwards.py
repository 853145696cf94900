"""Steps that two runs backpropagate in other parts: one loss after the other, or their sum at once.

Each backward sends its own share, so that gradients of single ones are not comparable. What the optimizer gets is.
"""

from __future__ import annotations

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.judge.pairs import Floats
from tensortap.compare.judge.structure import Structure
from tensortap.core.records import GRADIENT_KINDS

__all__ = ["OTHER_BACKWARDS", "rows_of_other_backwards"]

OTHER_BACKWARDS = "the runs backpropagate in other parts, and only the sum of these is comparable"
_AGREE = 1e-3
"""Relative error up to which two gradients are the same."""
_Scope = tuple[int, int, int]
_Gradient = tuple[_Scope, str, int, str, str]
"""Scope, module, call, kind and path of gradients, of which each backward through a call has one."""


def rows_of_other_backwards(
    reference: Side, candidate: Side, alignment: Alignment, structure: Structure, error: Floats
) -> set[int]:
    """Return the gradients of which one side has more than the other, if what the optimizer gets of all these
    parameters was recorded. If some agree, a backward is missing instead."""
    more: dict[_Scope, set[_Gradient]] = {}
    for side, alone in ((reference, alignment.only_reference), (candidate, alignment.only_candidate)):
        for row in alone[side.kind.among(GRADIENT_KINDS)[alone]].tolist() if len(alone) else ():
            path, _, number = side.path[row].partition("~")
            if number:
                scope = int(side.rank[row]), int(side.step[row]), int(side.micro[row])
                more.setdefault(scope, set()).add((scope, side.module[row], int(side.call[row]), side.kind[row], path))
    calls = {each[:3] for every in more.values() for each in every}  # what these send is only recorded once
    found: dict[_Scope, set[int]] = {}
    for row, scope in enumerate(structure.scope) if more else ():
        is_sent = structure.kind[row] == "grad_input" and (scope, structure.module[row], structure.number[row]) in calls
        if scope in more and (is_sent or _gradient(row, structure) in more[scope]):
            found.setdefault(scope, set()).add(row)
    apart = [rows for rows in found.values() if all(error[row] > _AGREE and _is_summed(row, structure) for row in rows)]
    return set().union(*apart)


def _gradient(row: int, structure: Structure) -> _Gradient:
    path = structure.path[row].partition("~")[0]
    return structure.scope[row], structure.module[row], structure.number[row], structure.kind[row], path


def _is_summed(row: int, structure: Structure) -> bool:
    """Whether a row is no gradient of a parameter, or the optimizer's was recorded as well."""
    at, path = structure.scope[row][:2], structure.path[row].partition("~")[0]
    return structure.kind[row] != "param_grad" or bool(
        structure.step_gradients_of.get((*at, structure.module[row], path))
    )
