"""Rules for pairs that differ by design, because the sides are of two frameworks: they raise a pair's rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Ints, Side
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.translate.translated import Translated
from tensortap.mapping.model_mapping import ModelMapping
from tensortap.mapping.outline import full_name

__all__ = ["Allowance", "find_allowances", "name_rules", "raise_rounding"]


class Allowance(NamedTuple):
    """The tolerance of one pair, in place of the rounding of its dtype."""

    at_least: float
    times: float
    """Factor over the usual rounding."""
    name: str
    """The rule, as reports show it."""


def find_allowances(
    reference: Side, candidate: Translated, alignment: Alignment, plan: ModelMapping
) -> dict[int, Allowance]:
    """Return the pairs that are allowed more than others."""
    return _variances(reference, alignment.reference, plan) | _parts(reference, candidate, alignment)


def raise_rounding(base: npt.NDArray[np.float64], allowances: Mapping[int, Allowance]) -> npt.NDArray[np.float64]:
    """Raise the rounding of these pairs, in place."""
    for pair, allowance in allowances.items():
        base[pair] = max(base[pair] * allowance.times, allowance.at_least)
    return base


def name_rules(judgement: Judgement, allowances: Mapping[int, Allowance]) -> None:
    """Name the allowance as the rule of each pair that is close."""
    for pair, allowance in allowances.items():
        if judgement.status[pair] == "close":
            judgement.rule[pair] = allowance.name


def _variances(reference: Side, rows: Ints, plan: ModelMapping) -> dict[int, Allowance]:
    """A running variance over batches of n numbers a channel differs by at most 1 / (n - 1), after the first batch."""
    if not plan.tensor_matches.bessel:
        return {}
    names = zip(reference.module.at(rows), reference.kind.at(rows), reference.path.at(rows), strict=True)
    flagged = [
        pair
        for pair, (module, kind, path) in enumerate(names)
        if kind == "buffer" and full_name(module, path) in plan.tensor_matches.bessel
    ]
    inputs = np.flatnonzero(np.array([word == "input" for word in reference.kind.words], bool)[reference.kind.codes])
    numbers = dict(zip(reference.module.at(inputs), reference.elements[inputs].tolist(), strict=True))
    found = {}
    for pair in flagged:
        row = int(rows[pair])
        if reference.step[row] > reference.step.min() or reference.call[row]:
            a_channel = numbers.get(reference.module[row], 0) / max(1, int(reference.elements[row]))
            off = 1 / (a_channel - 1) if a_channel > 1 else np.inf
            found[pair] = Allowance(off, 1.0, "torch divides a variance by n - 1, paddle by n")
    return found


def _parts(reference: Side, candidate: Translated, alignment: Alignment) -> dict[int, Allowance]:
    """A part that cancels out, like the gradient of a key's bias, is as rough as the whole that it was cut from."""
    cut = np.flatnonzero(candidate.cut[alignment.candidate])
    whole = candidate.own.l2[candidate.origin[alignment.candidate[cut]]]
    part = reference.l2[alignment.reference[cut]]
    times = np.divide(whole, part, out=np.full(len(cut), np.inf), where=part > 0)
    gradient = [kind == "param_grad" for kind in reference.kind.at(alignment.reference[cut])]
    return {
        int(pair): Allowance(0.0, max(1.0, float(much)), "rounding of the whole that it is a part of")
        for pair, much, counts in zip(cut, times, gradient, strict=True)
        if counts
    }
