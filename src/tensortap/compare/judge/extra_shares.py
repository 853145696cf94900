"""Gradients that only the candidate lets pass, to parameters that get one by another use on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.judge.missing_gradients import find_missing_gradients
from tensortap.compare.judge.structure import Structure
from tensortap.compare.matched import Matched
from tensortap.core.causes import Cause
from tensortap.core.records import Finding

__all__ = ["find_extra_shares"]


def find_extra_shares(
    matched: Matched, structure: Structure, born: Sequence[Finding]
) -> dict[tuple[int, float], Finding]:
    """Find code that lets a gradient pass where the reference's cuts it off, if that is why the gradients of parameters
    which have other uses as well are wrong. Keys are as those of `find_extra_gradients`.

    Seen from the candidate, the reference lacks that gradient: it is found in the same way. If the model itself gets it
    in the candidate alone, code outside lets it pass, which no record shows.
    """
    right, alone = matched.candidate, matched.alignment.only_candidate
    extra = alone[right.kind.among(("grad_output",))[alone]] if len(alone) else alone
    sent = set(right.module.at(extra))
    concerned = [each for each in born if each.cause is Cause.PARAMETER_GRADIENT and each.key.module in sent]
    if matched.plan is not None or not concerned:
        return {}
    pairs = np.argsort(matched.alignment.candidate)
    sides = matched.alignment.candidate[pairs], matched.alignment.reference[pairs]
    alignment = Alignment(*sides, alone, matched.alignment.only_reference)
    mirrored = Matched(right, matched.reference, alignment, matched.measures)
    found = find_missing_gradients(mirrored, mirrored.structure(), ())
    step, first = min((each.key.step, structure.seq[each.row]) for each in concerned if each.row is not None)
    return {
        (step, first - 0.5 + place * 1e-6): replace(
            end, status="extra", cause=Cause.EXTRA_IN_CONTAINER, rule="the reference has none"
        )
        for place, end in enumerate(found.values())
        if end.module in matched.reference.module.words and (end.module or "" not in sent)
    }
