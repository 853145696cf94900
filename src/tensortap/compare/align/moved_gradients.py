"""Gradients of parameters that come in another micro step on each side.

A parameter that several forwards use before one backward gets its gradient once, in the micro step of any of them.
Which one depends on the order in which the backward runs, so the two records are one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from tensortap.compare.align.alignment import Alignment, Ints
from tensortap.compare.align.side import Side

__all__ = ["with_moved_gradients"]

_Place = tuple[int, int, str, str]
"""Rank, step, module and path."""


def with_moved_gradients(reference: Side, candidate: Side, alignment: Alignment) -> Alignment:
    """Return the alignment with pairs of parameter gradients that each side has once in a step, in two micro steps."""
    if not _gradients(reference, alignment.only_reference).size:
        return alignment
    ours, theirs = (
        _single(side, rows)
        for side, rows in ((reference, alignment.only_reference), (candidate, alignment.only_candidate))
    )
    added = [(ours[place], theirs[place]) for place in ours.keys() & theirs.keys()]
    if not added:
        return alignment
    left, right = (np.array(rows, np.int64) for rows in zip(*added, strict=True))
    rows = np.concatenate([alignment.reference, left]), np.concatenate([alignment.candidate, right])
    order = np.argsort(rows[0], kind="stable")
    return replace(
        alignment,
        reference=rows[0][order],
        candidate=rows[1][order],
        only_reference=np.setdiff1d(alignment.only_reference, left),
        only_candidate=np.setdiff1d(alignment.only_candidate, right),
    )


def _gradients(side: Side, rows: Ints) -> Ints:
    return rows[side.kind.among(("param_grad",))[rows]] if len(rows) else rows


def _single(side: Side, alone: Ints) -> dict[_Place, int]:
    """Return the gradients without a counterpart that are the only ones of their parameter in a step."""
    candidates = {_place(side, row): row for row in _gradients(side, alone).tolist()}
    steps = np.isin(side.step, [step for _, step, _, _ in candidates])
    counts = Counter(_place(side, row) for row in _gradients(side, np.flatnonzero(steps)).tolist())
    return {place: row for place, row in candidates.items() if counts[place] == 1}


def _place(side: Side, row: int) -> _Place:
    return int(side.rank[row]), int(side.step[row]), side.module[row], side.path[row].partition("~")[0]
