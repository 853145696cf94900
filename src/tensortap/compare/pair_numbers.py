"""The numbers of every pair that judging needs."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Bools, Side
from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.rules.by_design import raise_rounding
from tensortap.compare.judge.rules.margins import MOST_ASSUMED
from tensortap.compare.judge.rules.rounding import EPSILON, Policy
from tensortap.compare.judge.unseen_makers import values_made_unseen
from tensortap.compare.matched import Matched
from tensortap.compare.measure.choices import ChoiceReader
from tensortap.compare.measure.kinks import kinks_between
from tensortap.compare.measure.mask_pairs import boolean_pairs
from tensortap.compare.measure.measures import Measures
from tensortap.compare.measure.movement import ReferenceMovement
from tensortap.compare.measure.selections import other_rows_between
from tensortap.compare.measure.step_noise import step_noise_between
from tensortap.compare.measure.token_order import reordered_between
from tensortap.compare.without_hidden import hidden_positions, scope_of

__all__ = ["errors_of", "pairs_of", "reference_movement"]


def pairs_of(matched: Matched) -> Pairs:
    """Return the numbers that judging needs."""
    left, right, alignment, measures = matched.reference, matched.candidate, matched.alignment, matched.measures
    rows, partners = alignment.reference, alignment.candidate
    base = np.array([[Policy.base(a, b) for b in right.dtype.words] for a in left.dtype.words])
    kinds = np.array([Policy.lengthening(kind) for kind in left.kind.words])
    error = errors_of(matched)
    error[measures.nonfinite | measures.reshaped] = np.inf
    rounding, mixed = np.empty(0), np.empty(0, bool)
    if len(rows):
        mixed = _mixed(left, right)[left.dtype.codes[rows], right.dtype.codes[partners]]
        rounding = base[left.dtype.codes[rows], right.dtype.codes[partners]] * kinds[left.kind.codes[rows]]
        rounding = np.maximum(rounding, np.minimum(_underflow(matched), MOST_ASSUMED))
        rounding = raise_rounding(rounding, matched.allowances)
    measures.masks |= boolean_pairs(left, right, alignment, measures.l2_difference)
    rounding[list(measures.masks)] = 0.0  # one hidden element more is a difference in any dtype
    hidden = hidden_positions(matched)
    mismatched = np.full(len(rows), np.nan)
    for pair, difference in measures.differences.items():
        mismatched[pair] = difference.mismatched
    return Pairs(
        error=error,
        row_gain=Policy.row_gain(left.row_length[rows]) if len(rows) else np.empty(0),
        l2=measures.sides["reference"]["l2"],
        candidate_l2=measures.sides["candidate"]["l2"],
        std=measures.sides["reference"]["std"],
        distance=measures.l2_difference,
        elements=measures.sides["reference"]["elements"],
        equal=measures.equal,
        nonfinite=measures.nonfinite & ~measures.equal,
        reshaped=measures.reshaped,
        zeros=alignment.of_reference(left.zeros) if len(rows) else np.empty(0, np.int64),
        dimensions=_dimensions(left)[rows] if len(rows) else np.empty(0, np.int8),
        base=rounding,
        limits=measures.limits,
        masks=measures.masks,
        shown=measures.shown,
        in_other_order=measures.in_other_order,
        other_lengths=_other_lengths(left, right, alignment, measures.reshaped),
        kink_of=kinks_between(left, right, alignment),
        selects_other_rows=other_rows_between(
            *(left, right, alignment), lambda pair: hidden.get(scope_of(matched, pair))
        ),
        is_reordered=reordered_between(left, right, alignment),
        including_activation={fusion.reference[0] for fusion in matched.fusions.found},
        step_noise_of=step_noise_between(left, right, alignment),
        keeps_gradients=_keeps_gradients(left, right, alignment),
        is_set_differently=matched.is_set_differently,
        moved_within_step=matched.moved_within_step,
        is_orthogonalized=matched.is_orthogonalized,
        choices=ChoiceReader(
            *(left, right, alignment, measures.l2_difference),
            hidden=lambda pair: hidden.get(scope_of(matched, pair)),
            draws=lambda: matched.settings.loop.draws_random,
        ),
        mixed=mixed,
        l1=alignment.of_reference(left.l1) if len(rows) else np.empty(0),
        mismatched=mismatched,
        most_apart_of=partial(_most_apart, measures),
        underflow=_underflow(matched),
        made_unseen=values_made_unseen(left, right, alignment),
    )


def errors_of(matched: Matched) -> npt.NDArray[np.float64]:
    """Return the error of each pair that is judged: of the whole, or of its worst row, scaled to the same tolerance."""
    measures, rows = matched.measures, matched.alignment.reference
    if not len(rows):
        return np.empty(0)
    return np.fmax(measures.rel_l2, measures.row_rel_l2 / Policy.row_gain(matched.reference.row_length[rows]))


def reference_movement(matched: Matched) -> ReferenceMovement:
    return ReferenceMovement(matched.reference, matched.alignment.reference)


def _underflow(matched: Matched) -> npt.NDArray[np.float64]:
    """Return the relative error of each pair whose elements are all off by the least number of its dtype."""
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    least = np.array([[Policy.underflow(a, b) for b in right.dtype.words] for a in left.dtype.words])
    if not least.any():
        return np.zeros(len(alignment.reference))
    sizes = least[left.dtype.codes[alignment.reference], right.dtype.codes[alignment.candidate]]
    ours = matched.measures.sides["reference"]
    l2, elements = np.asarray(ours["l2"], np.float64), np.asarray(ours["elements"], np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where((sizes > 0) & (l2 > 0), sizes * np.sqrt(elements) / l2, 0.0)
    return np.nan_to_num(found, nan=0.0, posinf=0.0)


def _most_apart(measures: Measures, pair: int) -> float:
    return measures.differences[pair].max_abs if pair in measures.differences else float("nan")


def _other_lengths(left: Side, right: Side, alignment: Alignment, reshaped: Bools) -> set[int]:
    """Return the reshaped pairs that differ in the length of their first axis alone."""
    rows, partners = alignment.reference, alignment.candidate
    pairs = np.flatnonzero(reshaped).tolist()
    return {pair for pair in pairs if left.shape(int(rows[pair]))[1:] == right.shape(int(partners[pair]))[1:]}


def _mixed(left: Side, right: Side) -> Bools:
    """Return by dtype codes of both sides whether they are two floats."""
    return np.array([[a != b and {a, b} <= set(EPSILON) for b in right.dtype.words] for a in left.dtype.words], bool)


def _keeps_gradients(reference: Side, candidate: Side, alignment: Alignment) -> bool:
    rows = alignment.reference
    if not len(rows):
        return False
    gradients = reference.kind.among(("param_grad", "step_grad"))[rows]
    return bool((gradients & reference.kept[rows] & candidate.kept[alignment.candidate]).any())


def _dimensions(side: Side) -> npt.NDArray[np.int8]:
    """Return the numbers of dimensions; 1 for a vector in three or more, such as a token of 1×1×n."""
    offsets, sizes = side.shapes.offsets.to_numpy(), side.shapes.flatten().to_numpy()
    total = np.concatenate([[0], np.cumsum(sizes > 1)])
    dimensions, long = np.diff(offsets), total[offsets[1:] - offsets[0]] - total[offsets[:-1] - offsets[0]]
    return np.asarray(np.where((dimensions > 2) & (long == 1), 1, dimensions), np.int8)  # a record has at most 64
