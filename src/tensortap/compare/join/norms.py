"""Numbers that summaries of single ranks lack: norms of sums, and differences of pairs that hold different parts."""

from __future__ import annotations

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.join.accumulated import accumulated_on_one_side
from tensortap.compare.join.geometry import region_of
from tensortap.compare.join.source import joined_source
from tensortap.compare.measure.measures import Measures
from tensortap.compare.translate.translated import Translated

__all__ = [
    "ACCUMULATED",
    "UNJOINED_LIMITS",
    "fill_norms",
    "withdraw_accumulated",
    "withdraw_guesses",
    "withdraw_other_parts",
]


def fill_norms(measures: Measures, reference: Side, candidate: Side, alignment: Alignment) -> None:
    """Give the reference's records of unknown norm that of the candidate's, or the estimate that a sketch gives.

    A relative error needs a size to be relative to; that of the candidate is the same if the pair is right.
    """
    if joined_source(reference.run) is None:
        return
    unknown = np.flatnonzero(np.isnan(measures.sides["reference"]["l2"]))
    if not len(unknown):
        return
    ours, theirs = measures.writable("reference", "l2"), measures.sides["candidate"]["l2"]
    ours[unknown] = theirs[unknown]
    both = unknown[np.isnan(ours[unknown])]
    matrix, which = reference.sketches()
    for pair in both.tolist():
        at = int(which[alignment.reference[pair]])
        if at >= 0:
            ours[pair] = float(np.linalg.norm(matrix[at].astype(np.float64)))


OTHER_PART = "it holds another part of the whole than the reference's"
GUESSED = "only norms and counts: the layout over ranks is not known"
ACCUMULATED = "one side shows the gradient of a micro batch, the other what was accumulated up to there"
UNJOINED_LIMITS = (OTHER_PART, GUESSED, ACCUMULATED)
"""Reasons for which a pair is not judged, although both sides have its record."""
_FAR = 0.01
"""Relative error from which on a guess about a layout is wrong."""


def withdraw_other_parts(measures: Measures, reference: Side, candidate: Side, alignment: Alignment) -> None:
    """Take back what is known of pairs of single ranks that hold different parts of a whole."""
    if joined_source(reference.run) is not None or joined_source(candidate.run) is not None:
        return
    if not any(side.run.placements(rank) for side in (reference, candidate) for rank in side.run.ranks):
        return
    left, right = _parts(reference)[alignment.reference], _parts(candidate)[alignment.candidate]
    _withdraw(measures, np.flatnonzero(left != right), OTHER_PART)


def withdraw_accumulated(measures: Measures, reference: Side, candidate: Side, alignment: Alignment) -> None:
    """Take back the measures of gradients that only one side accumulates."""
    _withdraw(measures, accumulated_on_one_side(reference, candidate, alignment), ACCUMULATED)


def _parts(side: Side) -> np.ndarray:
    """Return a number for the part that each record holds, the same on both sides; 0 for a whole, or if it is not
    known."""
    if isinstance(side, Translated):
        return _parts(side.own)[side.origin]
    found = np.zeros(len(side), np.int64)
    if not len(side) or "placement" not in side.table.column_names:
        return found
    numbers = side.table.column("placement").fill_null(-1).to_numpy()
    for rank in side.ranks:
        placements = side.run.placements(rank)
        codes = [0 if each.is_whole and not each.partials else hash(region_of(each)) for each in placements]
        own = side.rank == rank
        found[own] = np.array([*codes, 0], np.int64)[numbers[own]]
    return found


def withdraw_guesses(
    measures: Measures, reference: Side, candidate: Side, alignment: Alignment, pairs: np.ndarray
) -> None:
    """Take back the measures of pairs that are far off, if their ranks were only guessed to hold consecutive parts."""
    guessed = candidate.guessed[alignment.candidate[pairs]] | reference.guessed[alignment.reference[pairs]]
    if joined_source(reference.run) is None or not guessed.any():
        return
    chosen = pairs[guessed]
    unknown = ~(measures.rel_l2[chosen] <= _FAR) | np.isin(chosen, list(measures.limits))
    _withdraw(measures, chosen[unknown], GUESSED)


def _withdraw(measures: Measures, pairs: np.ndarray, why: str) -> None:
    for column in (measures.rel_l2, measures.row_rel_l2, measures.l2_difference, measures.cosine):
        column[pairs] = np.nan
    measures.equal[pairs] = False
    measures.reshaped[pairs] = False
    for pair in pairs.tolist():
        measures.differences.pop(pair, None)
    measures.withdrawn |= set(pairs.tolist())
    measures.limits |= dict.fromkeys(pairs.tolist(), why)
