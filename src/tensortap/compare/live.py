"""A comparison whose candidate was measured while it ran: what is left is to align, judge and say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from tensortap.compare.align import Renames, align
from tensortap.compare.comparing import Matched, Request, conclude, moved_in, noise_of, pairs_of
from tensortap.compare.isolated import Callers, isolated_findings
from tensortap.compare.judge import judge
from tensortap.compare.metrics import estimate, prepare
from tensortap.compare.side import Scope, Side
from tensortap.compare.structure import Structure
from tensortap.compare.tolerance import Policy
from tensortap.compare.verdict import findings
from tensortap.kernels.pairs import PairMeasure
from tensortap.records import KINDS, Comparison
from tensortap.store import Run

__all__ = ["Isolation", "conclude_live"]

_GRADIENTS = ("grad_output", "grad_input", "param_grad")


@dataclass(frozen=True)
class Isolation:
    """What is known of a run whose modules were fed from the reference."""

    forced: Collection[int]
    """The candidate's rows that the reference's values took the place of, once they were measured."""
    used_inside: Collection[int]
    """Rows of gradients at an output that the module itself uses further, so that a part of them is its own."""
    callers: Callers


def conclude_live(
    reference: Run,
    candidate: Run,
    measured: Mapping[int, PairMeasure],
    isolation: Isolation | None,
    request: Request,
) -> Comparison:
    """Judge what was measured. `measured` is by the candidate's rows."""
    renames = Renames.of(request.rename)
    right = Side(candidate, Scope(request.modules, rename=renames))
    backward = any(kind in _GRADIENTS for kind in right.kind.words)
    kinds = None if backward else [kind for kind in KINDS if kind not in _GRADIENTS]
    left = Side(reference, Scope(request.modules, kinds, candidate.steps, candidate.ranks))
    alignment = align(left, right, renames if renames else None)
    measures = prepare(left, right, alignment)
    rows: list[int] = right.row[alignment.candidate].tolist()
    for pair, row in enumerate(rows):
        if row in measured:
            measures.take(pair, measured[row])
    estimate(measures, left, right, alignment, np.flatnonzero(~measures.exact & ~measures.reshaped))
    matched = Matched(left, right, alignment, measures)
    with ExitStack() as files:
        policy = Policy(request.rtol, request.atol, noise_of(matched, request, files))
    structure, pairs = Structure(left, alignment.reference), pairs_of(matched)
    if isolation is None:
        judgement = judge(pairs, structure, policy, moved_in(matched))
        born = findings(judgement, structure, *matched.describing)
    else:
        forced = np.array([row in isolation.forced for row in rows], bool)
        judgement = judge(replace(pairs, forced=forced), structure, policy, moved_in(matched))
        own = {pair for pair, row in enumerate(rows) if row in isolation.used_inside}
        born = isolated_findings(judgement, structure, forced, own, isolation.callers, *matched.describing)
    result = conclude(matched, judgement, born, policy, renames, isolation is not None)
    if not backward and set(_GRADIENTS) & set(Side(reference, Scope()).kind.words):
        result = replace(result, notes=[*result.notes, "no backward ran: the reference's gradients were not compared"])
    return result
