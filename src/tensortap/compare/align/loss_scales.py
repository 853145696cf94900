"""Gradient scalers: one side multiplies its loss by a scale, so that gradients fit into float16, and divides them again
before the optimizer uses them. Gradients in between are compared as if the other side had the same scale.
"""

from __future__ import annotations

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.core.records import GRADIENT_KINDS
from tensortap.store import Run

__all__ = ["loss_scale", "with_one_loss_scale"]


def with_one_loss_scale(reference: Side, candidate: Side, alignment: Alignment) -> list[int]:
    """Multiply gradients of the side with the smaller scale, and return their pairs. Runs of several ranks are left as
    they are, and so are scales that are not known, or differ between several optimizers."""
    if len(reference.ranks) != 1 or len(candidate.ranks) != 1 or not len(alignment.reference):
        return []
    scaled: list[int] = []
    pairs = np.flatnonzero(reference.kind.among(GRADIENT_KINDS)[alignment.reference])
    left, right = alignment.reference[pairs], alignment.candidate[pairs]
    for ours, theirs in sorted(set(zip(reference.step[left].tolist(), candidate.step[right].tolist(), strict=True))):
        one, other = _scale(reference, ours), _scale(candidate, theirs)
        if one is None or other is None or one == other:
            continue
        factor = other / one
        here = (reference.step[left] == ours) & (candidate.step[right] == theirs)
        side, rows = (reference, left[here]) if factor > 1 else (candidate, right[here])
        side.rescale(np.unique(rows), max(factor, 1 / factor))
        scaled += pairs[here].tolist()
    return scaled


def _scale(side: Side, step: int) -> float | None:
    return loss_scale(side.run, side.ranks[0], step)


def loss_scale(run: Run, rank: int, step: int) -> float | None:
    """Return the scale of a rank's step; 1 without a scaler, None if it is not known, or not one for all optimizers."""
    facts = run.loop(rank)
    if not facts.subjects("optimizer"):
        return None
    values = [facts.value("scaler", step, of) for of in facts.subjects("optimizer")]
    scales = {float(value["scale"]) if value and value.get("scale") else 1.0 for value in values}
    return scales.pop() if len(scales) == 1 else None
