"""Aligns two runs and measures their pairs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Renames, align
from tensortap.compare.align.call_patterns import without_other_calls
from tensortap.compare.align.loss_scales import with_one_loss_scale
from tensortap.compare.align.moved_gradients import with_moved_gradients
from tensortap.compare.align.operators import align_operators
from tensortap.compare.align.side import Scope, Side, has_evaluation, has_operators
from tensortap.compare.align.splits import without_other_splits
from tensortap.compare.align.step_gradients import complete_step_gradients
from tensortap.compare.join.joining import NOT_JOINED, Joining
from tensortap.compare.join.norms import fill_norms, withdraw_accumulated, withdraw_guesses, withdraw_other_parts
from tensortap.compare.join.scaling import NO_SCALING, find_scaling
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.steps.judging import judge
from tensortap.compare.matched import Matched
from tensortap.compare.measure.edges import without_edges
from tensortap.compare.measure.engine import Engine
from tensortap.compare.measure.mask_measures import measure_masks
from tensortap.compare.measure.measures import estimate, prepare
from tensortap.compare.measure.padding import CausalPadding
from tensortap.compare.measure.tensors import Tolerances, is_little_work, measure_tensors
from tensortap.compare.measure.visible import leave_out_hidden_sums
from tensortap.compare.memory import release_unused
from tensortap.compare.options import ComparisonOptions
from tensortap.compare.pair_numbers import pairs_of, reference_movement
from tensortap.compare.translate.certainty import CERTAIN
from tensortap.compare.translate.fused import Fusions, find_fusions
from tensortap.compare.translate.mapped import (
    frameworks_differ,
    reference_name,
    without_ignored,
)
from tensortap.compare.translate.repeated import REPEATED, half_complex_pairs, measure_repeated, repeated_pairs
from tensortap.compare.translate.translated import Translated
from tensortap.compare.without_hidden import leave_out_hidden, without_padding
from tensortap.mapping.model_mapping import ModelMapping
from tensortap.store import Run

__all__ = ["match"]

_FIRST_PART = 256


def match(
    reference: Run,
    candidate: Run,
    renames: Renames,
    options: ComparisonOptions,
    progress: Callable[[int, int], None] | None,
    engine: Engine | None,
    plan: ModelMapping | None = None,
    joining: Joining = NOT_JOINED,
) -> Matched:
    """Align and measure. With `until_first`, pairs after the first divergence stay unmeasured."""
    apart = plan is not None or bool(joining)
    left = Side(reference, _scope(options, None, candidate, apart))
    known = renames if plan is None else partial(reference_name, plan)
    right = Side(candidate, _scope(options, known, reference, apart))
    complete_step_gradients(left, right)
    steps = _mapping(options.steps) if not (reference.is_checkpoint or candidate.is_checkpoint) else None
    rename = renames if renames else None
    fusions = Fusions()
    if plan is not None:
        kinds_known = not (reference.is_checkpoint or candidate.is_checkpoint)
        fusions = find_fusions(plan, left, right)
        right, rename = Translated(right, plan, kinds_known, fusions), None
    operators = align_operators(left, right, rename, steps, _mapping(options.ranks))
    alignment = operators.without_added(align(left, right, rename, steps, _mapping(options.ranks)))
    if plan is not None:
        alignment = without_ignored(alignment, left, plan)
    alignment, splits = without_other_splits(left, right, alignment)
    if plan is None and not steps:
        alignment = with_moved_gradients(left, right, alignment)
    alignment, patterns = without_other_calls(left, right, alignment)
    if joining:
        alignment = joining.without_unjoined(left, right, alignment)
    release_unused()
    scaling = find_scaling(left, right, alignment) if plan is None else NO_SCALING
    scaled = [] if joining else with_one_loss_scale(left, right, alignment)
    measures = prepare(left, right, alignment)
    fill_norms(measures, left, right, alignment)
    withdraw_other_parts(measures, left, right, alignment)
    withdraw_accumulated(measures, left, right, alignment)
    tolerances = (options.rtol, options.atol)
    repeated = [] if plan is None else repeated_pairs(left, right, alignment, measures)
    others = [*scaled, *half_complex_pairs(left, right, alignment, measures)]
    for pair, measure in measure_repeated(left, right, alignment, [*repeated, *others], tolerances):
        measures.take(pair, measure)
    measures.limits |= {pair: REPEATED for pair in repeated if pair not in measures.differences}
    taken = [pair for pair in others if pair in measures.differences]
    open_pairs = _without(measures.open, [*repeated, *taken])
    measure_masks(measures, left, right, alignment, open_pairs)
    open_pairs = _without(open_pairs, measures.masks)
    whole = left.kept[alignment.reference[open_pairs]] & right.kept[alignment.candidate[open_pairs]]
    estimate(measures, left, right, alignment, open_pairs[~whole])
    if plan is None and not joining:
        leave_out_hidden_sums(measures, left, right, alignment, open_pairs[~whole])
    withdraw_guesses(measures, left, right, alignment, open_pairs[~whole])
    found = Matched(
        *(left, right, alignment, measures, plan, repeated, fusions, splits),
        patterns=patterns,
        scaling=scaling,
        operators=operators,
    )
    stops = options.until_first and not options.noise  # with noise, divergence is known only at the end
    if stops:
        progress = None  # the total is unknown
    little = is_little_work(left, alignment, open_pairs[whole])
    padding = CausalPadding(left, right, alignment, measures)
    for part, last in _parts(found, open_pairs[whole], stops):
        measured = measure_tensors(left, right, alignment, part, tolerances, engine, progress, in_numpy=little)
        for pair, measure in measured:
            measures.take(pair, measure)
        _remeasure_edges(found, part, tolerances)
        padding.find(part)
        leave_out_hidden(found, part, tolerances)
        withdraw_guesses(measures, left, right, alignment, part)
        if stops and _diverges(found, last, options):
            break
    return found


def _without(pairs: npt.NDArray[np.int64], others: Collection[int]) -> npt.NDArray[np.int64]:
    return np.setdiff1d(pairs, list(others)) if others else pairs  # sorting takes longer than most of the rest


def _remeasure_edges(matched: Matched, pairs: npt.NDArray[np.int64], tolerances: Tolerances) -> None:
    """Measure pairs again whose elements at the edge of the range drown all others."""
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    for pair in pairs[matched.has_edges[pairs]].tolist():
        if pair in matched.measures.differences and pair not in matched.measures.masks:
            arrays = left.array(int(alignment.reference[pair])), right.array(int(alignment.candidate[pair]))
            found = without_edges(matched.measures.differences[pair], *arrays, *tolerances)
            matched.measures.replace(pair, found)


def _parts(
    matched: Matched, pairs: npt.NDArray[np.int64], until_first: bool
) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
    """Yield all pairs at once; or, with `until_first`, growing parts in execution order over all ranks, each with its
    last pair. Pairs of the same two tensors come together."""
    if not until_first:
        yield pairs, -1
        return
    left, right = matched.alignment.reference[pairs], matched.alignment.candidate[pairs]
    order = np.lexsort((matched.reference.seq[left], matched.reference.step[left]))
    tensors = np.stack([matched.reference.tensor_id[left], matched.candidate.tensor_id[right]])[:, order]
    pairs, same = pairs[order], np.unique(tensors, axis=1, return_inverse=True)[1].reshape(-1)
    begin, size, done = 0, _FIRST_PART, np.zeros(len(pairs), bool)
    while begin < len(pairs):
        part = np.isin(same, same[begin : begin + size]) & ~done
        done |= part
        yield pairs[part], int(pairs[: begin + size][-1])
        begin, size = begin + size, 2 * size


def _diverges(matched: Matched, last: int, options: ComparisonOptions) -> bool:
    """Whether the runs diverge up to a pair. Unmeasured pairs are not judged."""
    side, rows = matched.reference, matched.alignment.reference
    mapped = frameworks_differ(side.run, matched.candidate.run)
    policy = Policy(options.rtol, options.atol, mapped=mapped)
    known, structure = matched.levels(), matched.structure()

    def births(of: Matched) -> list[int]:
        return judge(pairs_of(of), structure, policy, reference_movement(of)).born

    born = births(matched)
    if (shown := without_padding(matched, structure, born, (options.rtol, options.atol))) is not None:
        born = births(shown) and born
    born = [row for row in born if known[row] == CERTAIN]

    def when(pair: int) -> tuple[int, int]:
        return int(side.step[rows[pair]]), int(side.seq[rows[pair]])

    return any(when(pair) <= when(last) for pair in born)


def _scope(options: ComparisonOptions, renames: Callable[[str], str] | None, other: Run, apart: bool) -> Scope:
    """Return the candidate's scope if there are `renames`, even empty ones; else the reference's, whose names patterns
    refer to. `other` is the other side's run; `apart`: operators of the two sides cannot be aligned."""

    def chosen(value: Collection[int] | Mapping[int, int] | None) -> Collection[int] | None:
        if isinstance(value, Mapping):
            return list(value) if renames is None else list(value.values())
        return value

    others = options.ranks
    if isinstance(others, Mapping):
        others = list(others.values()) if renames is None else list(others)
    return Scope(
        options.modules,
        options.kinds,
        chosen(options.steps),
        chosen(options.ranks),
        other.is_checkpoint,
        renames,
        not has_evaluation(other, others),
        apart or not has_operators(other, others),
    )


def _mapping(value: Any) -> Mapping[int, int] | None:
    return value if isinstance(value, Mapping) else None
