"""A comparison from end to end: open, align, measure, judge, conclude."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

from tensortap.compare.align.alignment import Renames, one_module_each
from tensortap.compare.align.loop import CLIPPED_INSIDE, clips_itself
from tensortap.compare.align.ranks import UnpairedRanks, unpaired_ranks
from tensortap.compare.details.pairs import PairDetails, choose_pairs, unreadable_tensors
from tensortap.compare.join.differing import with_differing_ranks
from tensortap.compare.join.evidence import ParallelEvidence
from tensortap.compare.join.joining import join_runs
from tensortap.compare.join.rank_parts import rank_parts
from tensortap.compare.judge.attribution import attribute
from tensortap.compare.judge.extra_gradients import find_extra_gradients
from tensortap.compare.judge.extra_shares import find_extra_shares
from tensortap.compare.judge.extremes import rows_with_right_extremes, with_right_extremes
from tensortap.compare.judge.findings import find_births, first_wrong_pair
from tensortap.compare.judge.free_precision import judge_free
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.missing_gradients import (
    find_calls_without_gradient,
    find_missing_gradients,
    find_uncalled_modules,
    find_uncertain_modules,
)
from tensortap.compare.judge.other_backwards import OTHER_BACKWARDS, rows_of_other_backwards
from tensortap.compare.judge.overflow import find_overflows
from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.precision import NO_PRECISION, calls_with_other_values
from tensortap.compare.judge.read_hidden import find_read_hidden
from tensortap.compare.judge.recomputations import find_recomputations
from tensortap.compare.judge.rules.by_design import name_rules
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.shown_elements import ShownElements
from tensortap.compare.judge.steps.judging import judge
from tensortap.compare.judge.structure import Structure
from tensortap.compare.judge.unpassed import find_unpassed
from tensortap.compare.judge.unread import find_unread
from tensortap.compare.matched import Matched
from tensortap.compare.matching import match
from tensortap.compare.measure.engines import engine_of
from tensortap.compare.measure.noise import as_one, noise_of
from tensortap.compare.measure.ranges import may_see_nothing, norms_between, ranges_between
from tensortap.compare.measure.sums import agreeing_sums_between, hidden_share, positions_in
from tensortap.compare.measure.truth import truth_of
from tensortap.compare.memory import rare_collections, release_unused
from tensortap.compare.options import ComparisonOptions
from tensortap.compare.pair_numbers import pairs_of, reference_movement
from tensortap.compare.say.conclusion import conclude
from tensortap.compare.say.zoom_hint import zoom_hint
from tensortap.compare.sources import Source, open_source
from tensortap.compare.translate.certainty import Doubts, judge_certain
from tensortap.compare.translate.mapped import exact_names, frameworks_differ, plan_of
from tensortap.compare.without_hidden import without_padding
from tensortap.core.records import KINDS, Comparison, display_name
from tensortap.core.spelling import close_names
from tensortap.core.zooming import zooms
from tensortap.errors import UsageError
from tensortap.mapping.model_mapping import ModelMapping
from tensortap.mapping.rules_file import read_rules
from tensortap.store import Run
from tensortap.store.formats.npy.tree import with_common_names

__all__ = ["open_comparison", "run_comparison"]


class _Judged(NamedTuple):
    """Two runs after judging."""

    matched: Matched
    pairs: Pairs
    policy: Policy
    structure: Structure
    judgement: Judgement
    doubts: Doubts
    judge_pairs: Callable[[Pairs], Judgement]
    """Judges the pairs again, with other numbers."""


def run_comparison(reference: Source, candidate: Source, options: ComparisonOptions) -> Comparison:
    with rare_collections(), ExitStack() as opened:
        return open_comparison(reference, candidate, options, opened)[0]


def open_comparison(
    reference_source: Source, candidate_source: Source, options: ComparisonOptions, opened: ExitStack
) -> tuple[Comparison, PairDetails]:
    """Return the comparison, and an inspector of its pairs that works as long as the runs are open."""
    kinds = (options.kinds,) if isinstance(options.kinds, str) else options.kinds or ()
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UsageError(f"kinds: {unknown[0]!r} is not a kind; there are {', '.join(KINDS)}")
    if options.zoom is not None:
        zooms().check_models(options.zoom)
    renames = Renames.of(options.rename)
    rules = None if options.mapping is None else read_rules(options.mapping)
    engine = engine_of(options, opened)
    reference, candidate = open_source(reference_source, opened), open_source(candidate_source, opened)
    _check_modules(reference, candidate, options, renames)
    names = None if rules is None or frameworks_differ(reference, candidate) else exact_names(rules)
    if names is not None:
        rules, renames = None, Renames.of(options.rename, names)
    if not renames and rules is None:
        reference, candidate = with_common_names(reference, candidate)
    renames = renames or one_module_each(reference, candidate)
    apart = reference, candidate
    reference, candidate, joining = join_runs(reference, candidate, options, renames)
    plan = plan_of(reference, candidate, renames, rules)

    def judged(plan: ModelMapping | None) -> _Judged:
        matched = match(reference, candidate, renames, options, options.progress, engine, plan, joining)
        pairs = pairs_of(matched)
        noise = as_one(noise_of(matched, options, opened, engine), pairs.row_gain)
        policy = Policy(options.rtol, options.atol, noise, mapped=frameworks_differ(reference, candidate))
        release_unused()
        structure = matched.structure()
        pairs = replace(pairs, other_gelus=matched.other_gelus(structure))
        sides = matched.reference, matched.candidate, matched.alignment
        if parts := rows_of_other_backwards(*sides, structure, pairs.error):
            pairs = pairs.as_equal(parts, OTHER_BACKWARDS)
        if policy.mapped and clips_itself(reference.loop()) != clips_itself(candidate.loop()):
            steps = [row for row, kind in enumerate(structure.kind) if kind == "step_grad"]
            pairs = pairs.as_equal(steps, CLIPPED_INSIDE)
        matched.measures.limits |= pairs.limits
        moved, without = reference_movement(matched), find_calls_without_gradient(matched, structure)

        def judge_pairs(known: Pairs) -> Judgement:
            return judge(known, structure, policy, moved, without)

        judgement, doubts = judge_certain(pairs, structure, matched.levels, judge_pairs)
        return _Judged(matched, pairs, policy, structure, judgement, doubts, judge_pairs)

    found = judged(plan)
    if found.doubts.modules and not found.judgement.born and (known := found.matched.paired_by_state(found.doubts)):
        found = judged(plan_of(reference, candidate, renames, rules, known))
    matched, pairs, policy, structure, judgement, doubts, judge_pairs = found
    name_rules(judgement, matched.allowances)
    inspector = PairDetails(
        matched.reference, matched.candidate, matched.alignment, matched.measures, (options.rtol, options.atol)
    )
    builder = matched.finding_builder(judgement, structure)
    missing = find_missing_gradients(matched, structure, judgement.affected_calls)
    extra = {**find_recomputations(matched), **find_extra_gradients(matched, structure)}
    parallel = ParallelEvidence.of(joining, matched)
    extra |= parallel.findings
    born = find_births(builder) or ([] if missing or extra else first_wrong_pair(builder))
    if not missing:
        missing = find_uncalled_modules(matched, structure, born)
    born = parallel.explained(born, structure)
    extra |= find_extra_shares(matched, structure, born)
    untied = matched.settings.untied_parameters if born else set()
    if born and all((finding.key.module, finding.key.path) in untied for finding in extra.values()):
        unread = find_unread(judgement, pairs, structure, policy, born, bool(missing), untied)
        judgement, born = unread.without(judgement), [each for each in born if each.row not in unread.rows]
        if born and not unread.rows and not missing:
            shown_alone = without_padding(matched, structure, judgement.born, (options.rtol, options.atol))
            if shown_alone is not None:
                other_pairs = replace(pairs_of(shown_alone), other_gelus=pairs.other_gelus)
                if not (without := judge_pairs(other_pairs)).born:
                    matched, pairs, judgement, born = shown_alone, other_pairs, without, []
                    name_rules(judgement, matched.allowances)
                    builder = matched.finding_builder(judgement, structure)
        sides = matched.reference, matched.candidate, matched.alignment
        right = set()
        if born and not unread.rows and may_see_nothing(*sides, pairs.masks):
            shown = ShownElements(
                *(ranges_between(*sides), agreeing_sums_between(*sides), hidden_share(*sides[::2])),
                norms=norms_between(*sides, positions_in(*sides[::2])),
                sums=min(side.sketch_size for side in sides[:2]),
            )
            right = rows_with_right_extremes(judgement, pairs, structure, born, shown)
        if right:
            pairs = with_right_extremes(pairs, right)
            judgement = judge_pairs(pairs)
            name_rules(judgement, matched.allowances)
            matched.measures.limits |= pairs.limits
            builder = matched.finding_builder(judgement, structure)
            born = find_births(builder) or first_wrong_pair(builder)
        read = find_read_hidden(
            *(judgement, pairs, structure, born, matched.reference_array),
            may_see_nothing=partial(may_see_nothing, *sides, pairs.masks),
        )
        judgement, born = read.without(judgement), [each for each in born if each.row not in read.rows]
    judgement, born = find_unpassed(judgement, structure, born)
    judgement, born = find_overflows(
        *(judgement, structure, born, matched.reference, matched.candidate, matched.alignment)
    )
    if not (born or missing or extra) and (guessed := find_uncertain_modules(matched, structure)):
        doubts = Doubts(list(dict.fromkeys([*doubts.modules, *guessed])), undecided=True)
    unpaired = UnpairedRanks() if joining else unpaired_ranks(matched, options.ranks)
    precision = NO_PRECISION
    others = calls_with_other_values(matched, structure, renames)
    if (truth := truth_of(matched, options, others, opened, engine)) is not None:
        elements = matched.measures.sides["reference"]["elements"]
        precision = judge_free(
            builder, truth, lambda pair: attribute(pair, structure, judgement), lambda pair: int(elements[pair])
        )
    error = pairs.error if options.details else None
    del found, pairs, builder, truth  # the table needs as much memory
    structure.release()
    for side in (matched.reference, matched.candidate):
        side.release_derived()
    release_unused()
    comparison = conclude(
        *(matched, judgement, born, policy, renames, missing, extra, unpaired),
        doubts=doubts,
        precision=precision,
        parallel=parallel,
    )
    if joining:
        comparison = replace(comparison, rank_parts=rank_parts(joining, matched))
        comparison = with_differing_ranks(comparison, *apart)
    sources = (reference_source, candidate_source, *options.noise, options.truth)
    in_memory = any(isinstance(source, Run) and source.in_memory for source in sources)
    comparison = replace(comparison, options=None if in_memory else options.as_arguments(pairing_only=True))
    if options.zoom is not None:
        comparison = zooms().zoom_comparison(comparison, *apart, options.zoom)
    elif not in_memory:
        comparison = replace(comparison, notes=[*comparison.notes, *zoom_hint(comparison, reference)])
    if options.details and len(comparison):
        assert error is not None
        chosen = choose_pairs(judgement.born, error, judgement.tolerance, options.details)
        details = list(inspector.details(chosen, options.details, options.progress))
        comparison = replace(comparison, details=details, notes=[*comparison.notes, *unreadable_tensors(details)])
    return comparison, inspector


def _check_modules(reference: Run, candidate: Run, options: ComparisonOptions, rename: Renames) -> None:
    """Raise UsageError if no module of either run has a name that `modules` asks for, and suggest some that exist."""
    if options.modules is None:
        return
    patterns = [options.modules] if isinstance(options.modules, str) else list(options.modules)
    columns = (run.columns(rank).column("module") for run in (reference, candidate) for rank in run.ranks)
    names = {name for column in columns for name in column.unique().to_pylist()}
    known = sorted(map(display_name, names | {rename(name) for name in names}))
    known_or_root = {*known, display_name("")}  # every model has a root, recorded or not
    wanted = [pattern or display_name("") for pattern in patterns]
    if not known or any(fnmatchcase(name, pattern) for pattern in wanted for name in known_or_root):
        return
    close = close_names(wanted, known)
    hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(known[:4])}" + _more(known[4:])
    raise UsageError(f"modules: no module of either run is called {' or '.join(map(repr, wanted))}; {hint}")


def _more(names: list[str]) -> str:
    return f" and {len(names)} more" if names else ""
