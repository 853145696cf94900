"""Two runs side by side: aligned, measured, and the numbers of every pair that judging needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment, Renames, align
from tensortap.compare.align.call_patterns import OtherCalls, without_other_calls
from tensortap.compare.align.calls import CallDifferences
from tensortap.compare.align.moved_gradients import with_moved_gradients
from tensortap.compare.align.operators import OperatorAlignment, align_operators
from tensortap.compare.align.settings import SettingDifferences
from tensortap.compare.align.side import Bools, Scope, Side, has_evaluation, has_operators
from tensortap.compare.align.splits import OtherSplits, without_other_splits
from tensortap.compare.align.step_gradients import complete_step_gradients
from tensortap.compare.join.joining import NOT_JOINED, Joining
from tensortap.compare.join.norms import fill_norms, withdraw_accumulated, withdraw_guesses, withdraw_other_parts
from tensortap.compare.join.scaling import NO_SCALING, Scaling, find_scaling
from tensortap.compare.join.shares import find_rounded_shares
from tensortap.compare.judge.findings import FindingBuilder
from tensortap.compare.judge.judging import Judgement
from tensortap.compare.judge.lost_masks import LostMask, find_lost_masks
from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.rules.by_design import Allowance, find_allowances, raise_rounding
from tensortap.compare.judge.rules.margins import MOST_ASSUMED
from tensortap.compare.judge.rules.rounding import EPSILON, Policy
from tensortap.compare.judge.steps.judging import judge
from tensortap.compare.judge.structure import Spot, Structure
from tensortap.compare.measure.choices import ChoiceReader
from tensortap.compare.measure.engine import Engine
from tensortap.compare.measure.gelu import other_gelus_between
from tensortap.compare.measure.hidden import EXPLAINS, HiddenPositions
from tensortap.compare.measure.kinks import kinks_between
from tensortap.compare.measure.masks import (
    MaskDifference,
    boolean_pairs,
    equal_flags,
    equal_mask,
    equal_masks,
    has_edges,
    mask_difference,
    mask_pairs,
    padding_masks,
    padding_positions,
    pattern_differences,
    reshaped_mask_difference,
    reshaped_mask_pairs,
    without_edges,
)
from tensortap.compare.measure.measures import Measures, estimate, prepare
from tensortap.compare.measure.movement import ReferenceMovement
from tensortap.compare.measure.padding import CausalPadding
from tensortap.compare.measure.step_noise import step_noise_between
from tensortap.compare.measure.tensors import Tolerances, is_little_work, measure_tensors
from tensortap.compare.measure.visible import have_same_padding, leave_out_hidden_sums
from tensortap.compare.memory import release_unused
from tensortap.compare.options import ComparisonOptions
from tensortap.compare.translate.certainty import CERTAIN, Doubts, Levels, certain_modules, levels, paired_by_state
from tensortap.compare.translate.fused import Fusions, find_fusions
from tensortap.compare.translate.mapped import (
    frameworks_differ,
    other_names,
    reference_name,
    without_ignored,
)
from tensortap.compare.translate.repeated import REPEATED, measure_repeated, repeated_pairs
from tensortap.compare.translate.translated import Translated
from tensortap.mapping.model_mapping import ModelMapping
from tensortap.mapping.outline import full_name
from tensortap.store import Run

__all__ = ["Matched", "errors_of", "match", "measure_masks", "pairs_of", "reference_movement", "without_padding"]

_FIRST_PART = 256
_OTHER_SHAPE = "masks of two shapes, of which summaries do not show whether they hide the same"
_TWO_SHAPES = "of one shape", "of another"


@dataclass(frozen=True)
class Matched:
    """Two sides, aligned and measured."""

    reference: Side
    candidate: Side
    alignment: Alignment
    measures: Measures
    plan: ModelMapping | None = None
    """How the candidate's names and layouts were mapped; None if they were not."""
    repeated: Sequence[int] = ()
    """Pairs that differ in shape only, because one side repeats a value that the other broadcasts."""
    fusions: Fusions = field(default_factory=Fusions)
    """Modules of one side that include what the other side has in separate modules."""
    splits: OtherSplits = field(default_factory=lambda: OtherSplits({}))
    """Steps that the sides split into other numbers of micro batches."""
    patterns: OtherCalls = field(default_factory=lambda: OtherCalls({}))
    """Modules that the sides call another number of times, on other parts of the same."""
    scaling: Scaling = NO_SCALING
    """The factor between the gradients of sides that split a batch over other numbers of ranks."""
    operators: OperatorAlignment = field(default_factory=OperatorAlignment)
    """How operators below the modules were aligned."""

    @cached_property
    def allowances(self) -> dict[int, Allowance]:
        """Pairs that are allowed more than others, because the frameworks or the layouts differ by design."""
        shares = find_rounded_shares(self.reference, self.candidate, self.alignment)
        if self.plan is None or not isinstance(self.candidate, Translated):
            return shares
        return shares | find_allowances(self.reference, self.candidate, self.alignment, self.plan)

    @cached_property
    def has_edges(self) -> Bools:
        """Whether elements of each pair are at the edge of their dtype's range; see `masks`."""
        return has_edges(self.reference, self.candidate, self.alignment)

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The candidate's names of the reference's modules, where they differ."""
        return {} if self.plan is None else other_names(self.plan)

    @cached_property
    def calls(self) -> CallDifferences:
        """The plain arguments in which the calls of the two sides differ."""
        return CallDifferences(self.reference, self.candidate, self.alignment, mapped=self.plan is not None)

    @cached_property
    def settings(self) -> SettingDifferences:
        """The attributes and ties in which the modules of the two sides differ."""
        comparable = not frameworks_differ(self.reference.run, self.candidate.run)
        return SettingDifferences(self.reference, self.candidate, self.alignment, comparable)

    def reference_array(self, pair: int) -> npt.NDArray[Any] | None:
        """Return the reference's tensor of a pair; None if it was not kept."""
        row = int(self.alignment.reference[pair])
        return self.reference.array(row) if self.reference.kept[row] else None

    def _class(self, pair: int) -> str:
        """Return the class of a pair's module."""
        row = int(self.alignment.reference[pair])
        key = self.fusions.key(self.reference.key(row))
        if self.plan is None or key.module == self.reference.module[row]:
            return self.reference.cls[row]
        return self.plan.module_matches.target.modules[key.module].cls

    def _zeros(self, pair: int) -> tuple[int, int]:
        ours, theirs = self.alignment.reference[pair], self.alignment.candidate[pair]
        return int(self.reference.zeros[ours]), int(self.candidate.zeros[theirs])

    def other_gelus(self, structure: Structure) -> set[int]:
        """Return the outputs that one side computes by a GELU with erf and the other by one with tanh."""
        differ = ~self.measures.equal & ~self.measures.reshaped
        return other_gelus_between(self.reference, self.candidate, self.alignment, structure, differ)

    def is_set_differently(self, pair: int) -> bool:
        """Whether the optimizers are known to have updated a pair of parameters with other settings so far."""
        if not self.settings.loop.optimizer:
            return False
        key = self.reference.key(int(self.alignment.reference[pair]))
        return bool(self.settings.loop.of_update(full_name(key.module, key.path), key.step - (not key.call)))

    def levels(self) -> Levels:
        """Return how certain each pair is."""
        if self.plan is None:
            return np.full(len(self.alignment.reference), CERTAIN, np.int8)
        return levels(self.reference, self.candidate, self.alignment, self.measures, self.plan)

    @cached_property
    def is_certain(self) -> Callable[[str], bool]:
        """Says of a module of the reference whether it is certain which one of the candidate it is."""
        if self.plan is None:
            return lambda module: True
        return certain_modules(self.reference, self.alignment, self.measures, self.plan)

    def paired_by_state(self, doubts: Doubts) -> dict[str, str]:
        """Return modules that their parameters show to be paired wrongly: the reference's name by the candidate's."""
        if self.plan is None or not isinstance(self.candidate, Translated):
            return {}
        return paired_by_state(self.reference, self.candidate.own, self.plan, doubts.modules)

    def structure(self) -> Structure:
        """Return how the pairs are related."""
        return Structure(self.reference, self.alignment.reference, self.fusions.renamed)

    def _lost_masks(self) -> Mapping[Spot, LostMask]:
        if self.plan is not None:
            return {}
        return find_lost_masks(self.reference, self.candidate, self.alignment, self.settings.are_same)

    def finding_builder(self, judgement: Judgement, structure: Structure, isolated: bool = False) -> FindingBuilder:
        """Return what builds findings from the judged pairs."""
        side, rows = self.reference, self.alignment.reference
        return FindingBuilder(
            judgement,
            structure,
            key_of=lambda pair: self.fusions.key(side.key(int(rows[pair]))),
            class_of=self._class,
            difference_of=self.measures.difference,
            candidate_names=self.names,
            argument_differences=self.calls.of,
            maker_of=lambda pair: self.fusions.maker(side.key(int(rows[pair]))),
            lost_masks=self._lost_masks(),
            zeros_of=self._zeros,
            isolated=isolated,
            checkpoints=side.run.is_checkpoint and self.candidate.run.is_checkpoint,
        )


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
    measures = prepare(left, right, alignment)
    fill_norms(measures, left, right, alignment)
    withdraw_other_parts(measures, left, right, alignment)
    withdraw_accumulated(measures, left, right, alignment)
    tolerances = (options.rtol, options.atol)
    repeated = [] if plan is None else repeated_pairs(left, right, alignment, measures)
    for pair, measure in measure_repeated(left, right, alignment, repeated, tolerances):
        measures.take(pair, measure)
    measures.limits |= {pair: REPEATED for pair in repeated if pair not in measures.differences}
    open_pairs = _without(measures.open, repeated)
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
        _leave_out_hidden(found, part, tolerances)
        withdraw_guesses(measures, left, right, alignment, part)
        if stops and _diverges(found, last, options):
            break
    return found


def _without(pairs: npt.NDArray[np.int64], others: Collection[int]) -> npt.NDArray[np.int64]:
    return np.setdiff1d(pairs, list(others)) if others else pairs  # sorting takes longer than most of the rest


def measure_masks(
    measures: Measures, reference: Side, candidate: Side, alignment: Alignment, pairs: npt.NDArray[np.int64]
) -> None:
    """Compare masks by what they hide: from their elements where both sides stored them, else from their sketches."""
    of_two_shapes = reshaped_mask_pairs(reference, candidate, alignment, np.flatnonzero(measures.reshaped))
    known: dict[tuple[int, int], Any] = {}
    from_sketches = []
    for pair in (*mask_pairs(reference, candidate, alignment, pairs), *of_two_shapes):
        left, right = int(alignment.reference[pair]), int(alignment.candidate[pair])
        if reference.kept[left] and candidate.kept[right]:
            tensors = int(reference.tensor_id[left]), int(candidate.tensor_id[right])
            if tensors not in known:
                compare = reshaped_mask_difference if measures.reshaped[pair] else mask_difference
                known[tensors] = compare(reference.array(left), candidate.array(right))
            if known[tensors] is not None:
                measures.take_mask(pair, known[tensors])
        elif measures.reshaped[pair]:
            elements = int(reference.elements[left])
            measures.take_mask(pair, MaskDifference(0.0, elements, elements, False, words=_TWO_SHAPES))
            measures.limits[pair] = _OTHER_SHAPE
        else:
            from_sketches.append(pair)
    for pair, found in pattern_differences(reference, candidate, alignment, from_sketches).items():
        measures.take_mask(pair, found)
    if len(pairs):
        _keep_equal_masks(measures, reference, candidate, alignment)


def _keep_equal_masks(measures: Measures, reference: Side, candidate: Side, alignment: Alignment) -> None:
    """Keep masks that are equal and hide everything from some positions: each kind of attention makes something else of
    these. Summaries do not show that, but whether the batch has padding."""
    known: dict[int, MaskDifference | None] = {}
    padded = {pair: mask for pair, mask in measures.masks.items() if mask.positions is None and not mask.differing}
    for pair in equal_masks(reference, candidate, alignment, measures.equal):
        row = int(alignment.reference[pair])
        tensor = int(reference.tensor_id[row])
        if not reference.kept[row]:
            elements = int(reference.elements[row])
            padded[pair] = MaskDifference(0.0, elements, elements, False)
        elif tensor not in known:
            known[tensor] = equal_mask(reference.array(row))
        if (found := known.get(tensor)) is not None:
            measures.masks[pair] = found
    if not measures.masks and not padded:  # code that makes its masks inside: the padding alone is known
        for pair in equal_flags(reference, candidate, alignment, measures.equal):
            if not reference.kept[row := int(alignment.reference[pair])]:
                padded[pair] = MaskDifference(0.0, elements := int(reference.elements[row]), elements, False)
    if padded and have_same_padding(reference, candidate):
        measures.masks |= {pair: replace(mask, is_padded=True) for pair, mask in padded.items()}


def without_padding(
    matched: Matched, structure: Structure, born: Sequence[int], tolerances: Tolerances
) -> Matched | None:
    """Return the runs with pairs measured without padding, in the forward passes after the first step in which a
    difference is born; None if no pair is.

    Padding is a token whose embedding is nearly zero. An optimizer's step makes noise of it, and a norm enlarges that.
    """
    hidden: dict[tuple[int, int, int], HiddenPositions] = {}
    scopes = {
        structure.scope[row]
        for row in born
        if structure.kind[row] in ("input", "output") and not structure.is_at_start(row)
    }
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    for row in padding_masks(left, alignment) if scopes else ():
        scope = _scope_at(left, row)
        if scope in scopes and left.kept[row]:
            hidden.setdefault(scope, HiddenPositions()).add(padding_positions(left.array(row)))
    if not any(hidden.values()):
        return None
    found = replace(matched, measures=deepcopy(matched.measures))
    whole = left.kept[alignment.reference] & right.kept[alignment.candidate]
    _measure_without(
        found, np.flatnonzero(whole & ~found.measures.equal & ~found.measures.reshaped), hidden, tolerances
    )
    return found if len(found.measures.shown) > len(matched.measures.shown) else None


def _leave_out_hidden(matched: Matched, pairs: npt.NDArray[np.int64], tolerances: Tolerances) -> None:
    """Measure pairs again without positions that a mask hides, where they differ there by more than rounding."""
    _measure_without(matched, pairs, _hidden_positions(matched), tolerances)


def _measure_without(
    matched: Matched,
    pairs: npt.NDArray[np.int64],
    hidden: Mapping[tuple[int, int, int], HiddenPositions],
    tolerances: Tolerances,
) -> None:
    """Measure pairs again without the positions that are hidden in their forward pass."""
    left, right, alignment, measures = matched.reference, matched.candidate, matched.alignment, matched.measures
    if not any(hidden.values()):
        return
    from_loss = left.kind.among(("grad_output",)) & left.module.among(("",))  # shows whether the loss reads them
    for pair in pairs[(left.phase.among(("forward",)) | from_loss)[alignment.reference[pairs]]].tolist():
        row, partner = int(alignment.reference[pair]), int(alignment.candidate[pair])
        off = float(measures.rel_l2[pair])
        known = hidden.get(_scope_of(matched, pair))
        if off <= Policy.base(left.dtype[row], right.dtype[partner]) or not known or pair in measures.masks:
            continue
        if pair in measures.shown:
            continue
        arrays = left.array(row), right.array(partner)
        if (shown := known.measure_shown(*arrays, *tolerances)) is not None:
            explained = not off <= EXPLAINS * shown.difference.rel_l2
            measures.take_shown(pair, shown, explained)
            if not explained and known.may_be_sorted(*arrays):
                measures.in_other_order.add(pair)


def _hidden_positions(matched: Matched) -> dict[tuple[int, int, int], HiddenPositions]:
    """Return by rank, step and micro step the positions that masks in two conventions hide."""
    hidden: dict[tuple[int, int, int], HiddenPositions] = {}
    for pair, mask in matched.measures.masks.items():
        if mask.frees_positions:
            hidden.setdefault(_scope_of(matched, pair), HiddenPositions()).add(mask.positions)
    return hidden


def _scope_of(matched: Matched, pair: int) -> tuple[int, int, int]:
    return _scope_at(matched.reference, int(matched.alignment.reference[pair]))


def _scope_at(side: Side, row: int) -> tuple[int, int, int]:
    return int(side.rank[row]), int(side.step[row]), int(side.micro[row])


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
    hidden = _hidden_positions(matched)
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
        including_activation={fusion.reference[0] for fusion in matched.fusions.found},
        step_noise_of=step_noise_between(left, right, alignment),
        keeps_gradients=_keeps_gradients(left, right, alignment),
        is_set_differently=matched.is_set_differently,
        choices=ChoiceReader(
            *(left, right, alignment, measures.l2_difference),
            hidden=lambda pair: hidden.get(_scope_of(matched, pair)),
            draws=lambda: matched.settings.loop.draws_random,
        ),
        mixed=mixed,
        l1=alignment.of_reference(left.l1) if len(rows) else np.empty(0),
        mismatched=mismatched,
        most_apart_of=partial(_most_apart, measures),
        underflow=_underflow(matched),
    )


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


def errors_of(matched: Matched) -> npt.NDArray[np.float64]:
    """Return the error of each pair that is judged: of the whole, or of its worst row, scaled to the same tolerance."""
    measures, rows = matched.measures, matched.alignment.reference
    if not len(rows):
        return np.empty(0)
    return np.fmax(measures.rel_l2, measures.row_rel_l2 / Policy.row_gain(matched.reference.row_length[rows]))


def reference_movement(matched: Matched) -> ReferenceMovement:
    return ReferenceMovement(matched.reference, matched.alignment.reference)


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
