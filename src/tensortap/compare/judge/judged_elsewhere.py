"""Records that could not be judged in one step and were in another: there, a mistake in their code would have shown.

A token that chose another expert, or an error that a network magnified, leaves some records of a step unjudged. If they
are few, and the same records of another step or micro step match, nothing was left unseen. If they are many, the step
itself was not compared, and a mistake that begins in it, as in the training loop, would not show.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.judge.judgement import Judgement
from tensortap.core.records import RIGHT_STATUSES

__all__ = ["all_judged_elsewhere"]

_FEW = 1 / 8
"""Share of the records of a step that may be unjudged."""


def all_judged_elsewhere(rows: Collection[int], judgement: Judgement, side: Side, alignment: Alignment) -> bool:
    """Whether these unjudged pairs are few of their step, and match in another step or micro step."""
    if not rows:
        return True
    ours = alignment.reference
    steps = side.step[ours]
    unjudged = np.array(sorted(rows))
    found, counts = np.unique(steps[unjudged], return_counts=True)
    if any(count > _FEW * np.count_nonzero(steps == step) for step, count in zip(found, counts, strict=True)):
        return False
    columns = side.rank, side.module.codes, side.kind.codes, side.path.codes, side.phase.codes, side.call
    slots = np.unique(np.stack([column[ours] for column in columns]), axis=1, return_inverse=True)[1].reshape(-1)
    judged = np.unique(slots[judgement.having(*RIGHT_STATUSES)])
    return bool(np.isin(slots[unjudged], judged).all())
