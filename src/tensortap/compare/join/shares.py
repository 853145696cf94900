"""Gradients of parameters that several ranks compute in shares, each rounded to a short dtype before they are added."""

from __future__ import annotations

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.join.scaling import batch_axes
from tensortap.compare.join.source import joined_source
from tensortap.compare.judge.rules.by_design import Allowance
from tensortap.compare.judge.rules.rounding import Policy

__all__ = ["find_rounded_shares"]

_SUMS = ("param_grad", "step_grad")
_RULE = "each rank rounds its share of a sum to a shorter dtype"


def find_rounded_shares(reference: Side, candidate: Side, alignment: Alignment) -> dict[int, Allowance]:
    """Return the gradients that are allowed the rounding of the dtype in which their module computes.

    Mixed precision computes them in bfloat16 or float16, and keeps them in float32. Where both sides divide the batch
    alike, all shares are rounded alike, and nothing is allowed.
    """
    joined = [joined_source(side.run) for side in (reference, candidate)]
    ours, theirs = ({} if source is None else batch_axes(source) for source in joined)
    if ours == theirs or not len(alignment.reference):
        return {}
    coarseness = np.array([Policy.base(word, word) for word in reference.dtype.words])[reference.dtype.codes]
    flowing = reference.kind.among(("output", "grad_output"))
    coarsest = np.zeros(len(reference.module.words))
    np.maximum.at(coarsest, reference.module.codes[flowing], coarseness[flowing])
    rows = alignment.reference
    rounding = coarsest[reference.module.codes[rows]]
    chosen = reference.kind.among(_SUMS)[rows] & (rounding > coarseness[rows])
    longer = Policy.lengthening("param_grad")
    return {pair: Allowance(longer * float(rounding[pair]), 1.0, _RULE) for pair in np.flatnonzero(chosen).tolist()}
