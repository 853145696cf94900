"""Values that the model returns, and that one side alone makes where modules are seen.

A layer that is compiled on its own hides the module that makes such a value, and what else uses it there, as a router's
choice of experts does beside a term of the loss. The gradient of the value is then only what comes from outside the
layer, while the other side's is the sum over all uses.
"""

from __future__ import annotations

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side

__all__ = ["values_made_unseen"]


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
