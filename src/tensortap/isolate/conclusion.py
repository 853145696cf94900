"""Concludes a comparison whose candidate was measured while it ran: aligns, judges and words the result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment, Renames, align
from tensortap.compare.align.call_patterns import without_other_calls
from tensortap.compare.align.ranks import UnpairedRanks, unchecked_ranks
from tensortap.compare.align.side import Scope, Side
from tensortap.compare.align.splits import other_micro_batches
from tensortap.compare.judge.checked_pairs import CheckedPairs
from tensortap.compare.judge.differentiated import DIFFERENTIATED, rows_of_differentiated
from tensortap.compare.judge.extra_gradients import find_extra_gradients
from tensortap.compare.judge.findings import find_births, first_wrong_pair
from tensortap.compare.judge.isolated import isolated_findings
from tensortap.compare.judge.isolated_attribution import IsolatedAttributor
from tensortap.compare.judge.isolation import Isolation
from tensortap.compare.judge.missing_gradients import (
    find_calls_without_gradient,
    find_lost_term,
    find_missing_gradients,
    find_missing_in_isolation,
    without_reordered,
)
from tensortap.compare.judge.missing_rows import Parameters
from tensortap.compare.judge.other_backwards import OTHER_BACKWARDS
from tensortap.compare.judge.overflow import find_overflows
from tensortap.compare.judge.pairs import IsolatedPairs, Pairs
from tensortap.compare.judge.precision import NO_PRECISION, TruthPairs, calls_with_other_values, judge_isolated
from tensortap.compare.judge.read_hidden import find_read_in_isolation
from tensortap.compare.judge.recomputations import find_recomputations
from tensortap.compare.judge.rules.rounding import NoiseAllowance, Policy
from tensortap.compare.judge.steps.judging import judge
from tensortap.compare.judge.structure import Structure
from tensortap.compare.judge.unpassed import UNPASSED, find_unpassed
from tensortap.compare.judge.unread import find_unread
from tensortap.compare.judge.unseen_makers import without_unseen_gradients
from tensortap.compare.matched import Matched
from tensortap.compare.measure.measures import estimate, prepare
from tensortap.compare.measure.noise import as_one, noise_of
from tensortap.compare.options import ComparisonOptions
from tensortap.compare.pair_numbers import pairs_of, reference_movement
from tensortap.compare.say.conclusion import conclude
from tensortap.compare.say.formatting import listed
from tensortap.core.causes import Cause
from tensortap.core.records import GRADIENT_KINDS, MODULE_KINDS, Comparison, display_name
from tensortap.isolate.choices import LiveChoiceReader
from tensortap.isolate.comparator import Comparator
from tensortap.isolate.truth import FLOAT64, Truth
from tensortap.store import Run

__all__ = ["conclude_live"]

_MOST_NAMED = 4


def conclude_live(
    reference: Run,
    seen: Comparator,
    isolation: Isolation | None,
    parameters: Parameters,
    options: ComparisonOptions,
    truth: Truth | None = None,
) -> Comparison:
    """Judge what a comparator has measured. `isolation` is None in a free run."""
    candidate = seen.run
    renames = Renames.of(options.rename)
    right = Side(candidate, Scope(options.modules, rename=renames))
    backward = any(kind in GRADIENT_KINDS for kind in right.kind.words)
    left_out = () if backward else GRADIENT_KINDS
    if "step_grad" not in right.kind.words:  # without optimizer=, a check sees no gradient of a step
        left_out = ("step_grad", *left_out)
    kinds = [kind for kind in MODULE_KINDS if kind not in left_out]
    left = Side(reference, Scope(options.modules, kinds, candidate.steps, candidate.ranks, training_only=True))
    alignment = align(left, right, renames if renames else None)
    alignment, patterns = without_other_calls(left, right, alignment)
    measures = prepare(left, right, alignment)
    rows: list[int] = right.row[alignment.candidate].tolist()
    for pair, row in enumerate(rows):
        if row in seen.shown:
            measures.take_shown(pair, seen.measured[row], seen.shown[row])
        elif row in seen.measured:
            measures.take(pair, seen.measured[row])
            if row in seen.unpassed:
                measures.limits[pair] = UNPASSED
        if row in seen.shares:  # the norms that were recorded are those of the whole gradient
            measures.sides["reference"]["l2"][pair] = np.nan
        if row in seen.reordered:
            measures.reordered.add(pair)
        if row in seen.masks and measures.equal[pair]:
            measures.masks[pair] = seen.masks[row]
        elif row in seen.masks:
            measures.take_mask(pair, seen.masks[row])
    estimate(measures, left, right, alignment, np.flatnonzero(~measures.exact & ~measures.reshaped))
    matched = Matched(left, right, alignment, measures, patterns=patterns)
    structure = Structure(left, alignment.reference)
    pairs = replace(
        pairs_of(matched),
        kink_of=lambda pair: seen.kinks.get(rows[pair]),
        step_noise_of=lambda pair: seen.step_noise.get(rows[pair]),
        keeps_gradients=bool(seen.step_noise),
        is_reordered=lambda pair, allowed: pair in measures.reordered,
        choices=LiveChoiceReader(seen.choices, rows),
        other_gelus={pair for pair, row in enumerate(rows) if row in seen.other_gelus},
    )
    without = find_calls_without_gradient(matched, structure, free=isolation is None)
    with ExitStack() as files:
        noise = noise_of(matched, options, files)
    of_one_backward = {pair for pair, row in enumerate(rows) if row in seen.parts}
    measures.limits |= dict.fromkeys(of_one_backward, OTHER_BACKWARDS)
    if isolation is None:
        pairs = pairs.as_equal(of_one_backward, OTHER_BACKWARDS)
        policy = Policy(options.rtol, options.atol, as_one(noise, pairs.row_gain))
        judgement = judge(pairs, structure, policy, reference_movement(matched), without)
        born = find_births(matched.finding_builder(judgement, structure))
        missing = find_missing_gradients(matched, structure, judgement.affected_calls, parameters)
    else:
        numbers = right.row[alignment.candidate]
        pairs = _alone(pairs, matched, noise, np.array([row in isolation.forced for row in rows], bool), isolation.tied)
        pairs = pairs.as_equal(of_one_backward, OTHER_BACKWARDS)
        if split := rows_of_differentiated(pairs, structure, isolation.differentiated):
            pairs = pairs.as_equal(split, DIFFERENTIATED)
            measures.limits |= pairs.limits
        policy = Policy(options.rtol, options.atol, as_one(noise, pairs.row_gain), alone=True)
        judgement = judge(pairs, structure, policy, reference_movement(matched), without)
        missing = find_missing_in_isolation(matched, structure, isolation, parameters)
        missing = without_unseen_gradients(missing, pairs.made_unseen, structure, judgement)
        lost = without_reordered({left.key(row) for row in alignment.only_reference.tolist()}, matched)
        builder = matched.finding_builder(judgement, structure, isolated=True)
        gained_keys = {right.key(row) for row in alignment.only_candidate.tolist()}
        untied = matched.settings.untied_parameters if judgement.born else set()
        checked = CheckedPairs.of(builder, isolation, numbers, lost, gained_keys, bool(missing), untied)
        born = isolated_findings(builder, checked)
        known = {birth.module for birth in born}
        if missing and known:
            wrong = {birth.module for birth in born if birth.key.phase == "forward"}
            missing = find_missing_in_isolation(matched, structure, isolation, parameters, wrong)
        missing = {row: end for row, end in missing.items() if not {end.module, end.key.module} & known}
        if any(birth.cause is Cause.LOST_INPUT for birth in born):
            # A parameter that is used together with an input has no gradient without that.
            lacking = {key.module for key in lost if key.kind == "input"}
            of_others = {row for row, end in missing.items() if end.key.kind != "param_grad"}
            of_others |= {row for row, end in missing.items() if end.key.module not in lacking}
            missing = {row: end for row, end in missing.items() if row in of_others}
        if not born and not missing and backward:
            missing = find_lost_term(matched, parameters)
    if born and not missing:
        unread = find_unread(judgement, pairs, structure, policy, born)
        judgement, born = unread.without(judgement), [each for each in born if each.row not in unread.rows]
        if isolation is not None:
            read = find_read_in_isolation(judgement, pairs, structure, born, partial(_kept, left, alignment))
            judgement, born = read.without(judgement), [each for each in born if each.row not in read.rows]
    if isolation is None:
        judgement, born = find_unpassed(judgement, structure, born)
    judgement, born = find_overflows(judgement, structure, born, left, right, alignment, isolation is not None)
    precision = NO_PRECISION
    if isolation is not None and truth is not None:
        blamed = {(birth.rank, birth.module) for birth in (*born, *missing.values())}
        found = _truth_pairs(matched, structure, rows, truth, renames)
        precision = judge_isolated(builder, found, IsolatedAttributor(checked).attribute, blamed)
    gained = find_extra_gradients(matched, structure, explained=isolation is not None and bool(born))
    gained = {**find_recomputations(matched), **gained}
    if not (born or missing or gained):
        born = first_wrong_pair(matched.finding_builder(judgement, structure, isolation is not None))
    result = conclude(
        matched,
        judgement,
        born,
        policy,
        renames,
        missing,
        gained,
        UnpairedRanks(),
        isolated=isolation is not None,
        precision=precision,
    )
    unseen = not backward and bool(set(GRADIENT_KINDS) & set(Side(reference, Scope()).kind.words))
    notes = [*result.notes, *(["no backward ran: the reference's gradients were not compared"] if unseen else [])]
    notes += _other_steps(matched, options.steps or ())
    if isolation is not None and isolation.holders:
        names = listed([display_name(each) for each in sorted(isolation.holders)], _MOST_NAMED)
        notes.append(f"passed on by an attribute of the module, and not compared: tensors of {names}")
    unchecked = unchecked_ranks(reference, candidate)
    if unchecked:
        notes.insert(0, f"{unchecked}: run the model on as many ranks as the reference to check them")
    text = result.sentence
    if result.verdict == "diverged" and (splits := other_micro_batches(left, right)):
        (_, step), (ours, theirs) = next(iter(splits.items()))
        result = replace(result, verdict="incomparable", first=None, births=())
        text = (
            f"Cannot tell: the reference splits step {step} into {ours:,} micro batch{'es' * (ours > 1)} and the model "
            f"into {theirs:,}. A check gives each call the reference's own inputs: run the same micro batches, or "
            "compare two runs, which shows the gradients that a step sums."
        )
    if not len(right):
        text = "Nothing to judge: no module of the model ran in the block, in a step that the reference has."
    elif result.verdict in ("match", "imprecise") and not candidate.finished:
        text = f"The step was interrupted. Up to there: {text}"
    elif result.verdict in ("match", "imprecise") and unseen:
        text += " No backward ran: the reference's gradients were not compared."
    if result.verdict in ("match", "imprecise") and unchecked:
        text += f" {unchecked[0].upper()}{unchecked[1:]}."
        if result.verdict == "match":
            result = replace(result, verdict="incomparable")
            text = f"Cannot tell whether all ranks match. {text}"
    # A model that ran cannot be compared again from a command line: no options.
    return replace(result, options=None, notes=notes, sentence=text)


def _kept(side: Side, alignment: Alignment, pair: int) -> npt.NDArray[Any] | None:
    """Return the reference's tensor of a pair; None if it was not kept."""
    row = int(alignment.reference[pair])
    return side.array(row) if side.kept[row] else None


def _truth_pairs(
    matched: Matched, structure: Structure, rows: Sequence[int], truth: Truth, renames: Renames
) -> TruthPairs:
    """Return the distances from the truth by pair; `truth` has them by the candidate's rows."""
    left, right, alignment = matched.reference, matched.candidate, matched.alignment

    def dtypes(pair: int) -> tuple[str, str]:
        return left.dtype[int(alignment.reference[pair])], right.dtype[int(alignment.candidate[pair])]

    others = calls_with_other_values(matched, structure, renames)
    measures = {pair: truth.measured[row] for pair, row in enumerate(rows) if row in truth.measured}
    gradients = [kind in GRADIENT_KINDS for kind in structure.kind]
    notes, unjudged = tuple(truth.notes()), tuple(truth.unjudged())
    return TruthPairs(measures, FLOAT64, truth.of_reference, dtypes, others, gradients.__getitem__, notes, unjudged)


def _other_steps(matched: Matched, wanted: Collection[int]) -> list[str]:
    """Return notes if the model ran fewer steps than the reference has, or several as one."""
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    if not len(right):
        return []
    ran = sorted(set(right.step.tolist()))
    advice = "give the optimizer, or call check.step() after each step"
    if never := sorted(set(wanted) - set(ran)):
        what = f"the reference has step{'s' * (len(never) > 1)} {listed(never)}"
        return [f"{what}, which the model did not run, or not as a step of its own: {advice}"]
    beyond = alignment.only_candidate[right.micro[alignment.only_candidate] > left.micro.max(initial=0)]
    if len(beyond):
        return [f"the model ran more often in step {int(right.step[beyond[0]])} than the reference: {advice}"]
    return []


def _alone(
    pairs: Pairs,
    matched: Matched,
    noise: NoiseAllowance | None,
    forced: npt.NDArray[np.bool_],
    tied: Mapping[str, Collection[str]],
) -> Pairs:
    """Pairs of modules that stand for themselves: their worst rows count more, and an error along the tensor too."""
    left, right, alignment, measures = matched.reference, matched.candidate, matched.alignment, matched.measures
    kinds, lengths = left.kind.at(alignment.reference), left.row_length[alignment.reference].tolist()
    counts = np.array([Policy.has_rows(*each) for each in zip(kinds, lengths, strict=True)], bool)
    row_gain = Policy.row_gain_alone(pairs.base, counts, noise)
    with np.errstate(invalid="ignore"):  # infinitely far off, of rows that do not count
        error = np.where(np.isinf(pairs.error), np.inf, np.fmax(measures.rel_l2, measures.row_rel_l2 / row_gain))
    ours, theirs = (measures.sides[name]["l2"] for name in ("reference", "candidate"))
    for pair, off in measures.differences.items():
        if matched.has_edges[pair] or pair in measures.masks:
            continue  # the norms are those of a mask's hidden elements, which the difference leaves out
        if ours[pair] > 0 and Policy.has_direction(kinds[pair], off.elements):
            along = ((theirs[pair] / ours[pair]) ** 2 - 1 - off.rel_l2**2) / 2
            error[pair] = max(error[pair], Policy.along(along))
    dtypes = left.dtype.at(alignment.reference), right.dtype.at(alignment.candidate)
    cast = np.array([one != other for one, other in zip(*dtypes, strict=True)], bool)
    isolated = IsolatedPairs(forced, cast & forced, tied)
    return replace(pairs, error=error, row_gain=row_gain, isolated=isolated)
