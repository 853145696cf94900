"""Values that the model returns, and that one side alone makes where modules are seen.

A layer that is compiled on its own hides the module that makes such a value, and what else uses it there, as a router's
choice of experts does beside a term of the loss. The gradient of the value is then only what comes from outside the
layer, while the other side's is the sum over all uses.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.structure import Structure
from tensortap.core.records import RIGHT_STATUSES, Finding

__all__ = ["layer_around", "values_made_unseen", "without_unseen_gradients"]


def values_made_unseen(reference: Side, candidate: Side, alignment: Alignment) -> dict[int, str]:
    """Return the pairs of such values and of their gradients, and the module that makes each."""
    found: dict[int, str] = {}
    for side, rows, alone in (
        (reference, alignment.reference, alignment.only_reference),
        (candidate, alignment.candidate, alignment.only_candidate),
    ):
        if not len(rows) or not len(alone):
            continue
        made = alone[side.kind.among(("output",))[alone]]
        makers = {int(side.tensor_id[row]): side.module[row] for row in made[::-1].tolist()}  # the first makes it
        is_output = side.kind.among(("output",))[rows]
        returned = np.flatnonzero(is_output & np.isin(side.tensor_id[rows], side.tensor_id[made])).tolist()
        found |= {pair: makers[int(side.tensor_id[rows[pair]])] for pair in returned}
        values = {_call_and_path(side, int(rows[pair])): found[pair] for pair in returned}
        for pair in np.flatnonzero(side.kind.among(("grad_output",))[rows]).tolist() if values else ():
            if maker := values.get(_call_and_path(side, int(rows[pair]))):
                found.setdefault(pair, maker)
    return found


def _call_and_path(side: Side, row: int) -> tuple[int, int, int, str, int, str]:
    call = int(side.rank[row]), int(side.step[row]), int(side.micro[row]), side.module[row], int(side.call[row])
    return *call, side.path[row].partition("~")[0]


def layer_around(structure: Structure, scope: tuple[int, int, int], module: str) -> CallRows | None:
    """Return the call of the innermost module around one that runs unseen, if gradients inside it are known."""
    while module:
        module = module.rpartition(".")[0]
        if calls := structure.calls_of_module.get((scope, module), ()):
            return calls[0] if structure.held_inside(calls[0]) else None
    return None


def without_unseen_gradients(
    missing: Mapping[int, Finding], made_unseen: Mapping[int, str], structure: Structure, judgement: Judgement
) -> dict[int, Finding]:
    """Return the missing gradients without those of values that a layer makes unseen, if all gradients inside it are
    right: its own code alone uses such a value."""
    makers = {
        (structure.scope[row], structure.module[row], structure.number[row], structure.path[row]): maker
        for row, maker in (made_unseen.items() if missing else ())
        if structure.kind[row] == "output"
    }
    found = {}
    for row, end in missing.items():
        key, scope = end.key, (end.rank, end.key.step, end.key.micro)
        maker = makers.get((scope, key.module, key.call, key.path)) if key.kind == "grad_output" else None
        layer = None if maker is None else layer_around(structure, scope, maker)
        if layer is None or not all(judgement.status[each] in RIGHT_STATUSES for each in structure.held_inside(layer)):
            found[row] = end
    return found
