"""The comparison from end to end: open, align, measure, judge, say."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

from tensortap.compare.align.alignment import Renames, one_module_each
from tensortap.compare.align.ranks import unpaired_ranks
from tensortap.compare.details.pairs import Closeups, damage_in, worth_a_look
from tensortap.compare.judge.findings import findings, whatever_is_wrong
from tensortap.compare.judge.judging import Judgement, Pairs, judge
from tensortap.compare.judge.one_sided import extra, lost_in_free_run, without_gradient
from tensortap.compare.judge.structure import Structure
from tensortap.compare.judge.tolerance import Policy
from tensortap.compare.matching import Matched, device_of, match, moved_in, pairs_of
from tensortap.compare.measure.noise import as_one, noise_of
from tensortap.compare.request import Request, open_source
from tensortap.compare.say.conclusion import conclude
from tensortap.compare.translate.certainty import Doubts, judge_certain
from tensortap.compare.translate.map_file import read_map
from tensortap.compare.translate.mapped import explain, frameworks_differ, plan_of
from tensortap.core.records import KINDS, Comparison
from tensortap.errors import UsageError
from tensortap.mapping.model_mapping import ModelMapping
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


def run_comparison(request: Request) -> Comparison:
    with ExitStack() as opened:
        return open_comparison(request, opened)[0]


def open_comparison(request: Request, opened: ExitStack) -> tuple[Comparison, Closeups]:
    """The comparison, and what looks at its pairs closely for as long as the runs are open."""
    renames = Renames.of(request.rename, read_map(request.map_file))
    kinds = (request.kinds,) if isinstance(request.kinds, str) else request.kinds or ()
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UsageError(f"kinds: {unknown[0]!r} is not a kind; there are {', '.join(KINDS)}")
    device = device_of(request)
    reference, candidate = open_source(request.reference, opened), open_source(request.candidate, opened)
    if not renames and request.mapping is None:
        reference, candidate = with_common_names(reference, candidate)
    renames = renames or one_module_each(reference, candidate)
    plan = plan_of(reference, candidate, renames, request.mapping)

    def judged(plan: ModelMapping | None) -> _Judged:
        matched = match(reference, candidate, renames, request, request.progress, device, plan)
        pairs = pairs_of(matched)
        noise = as_one(noise_of(matched, request, opened, device), pairs.row_gain)
        policy = Policy(request.rtol, request.atol, noise, mapped=frameworks_differ(reference, candidate))
        structure = matched.structure()
        moved, deprived = moved_in(matched), without_gradient(matched, structure)
        judgement, doubts = judge_certain(
            pairs, structure, matched.levels, lambda known: judge(known, structure, policy, moved, deprived)
        )
        return _Judged(matched, pairs, policy, structure, judgement, doubts)

    found = judged(plan)
    if found.doubts.modules and not found.judgement.born and (known := found.matched.paired_by_state(found.doubts)):
        found = judged(plan_of(reference, candidate, renames, request.mapping, known))
    matched, pairs, policy, structure, judgement, doubts = found
    explain(judgement, matched.allowed)
    closeups = Closeups(
        matched.reference, matched.candidate, matched.alignment, matched.measures, (request.rtol, request.atol)
    )
    case = matched.case(judgement, structure)
    missing, gained = lost_in_free_run(matched, structure, judgement.deprived), extra(matched, structure)
    born = findings(case) or ({} if missing or gained else whatever_is_wrong(case))
    unpaired = unpaired_ranks(matched, request.ranks)
    comparison = conclude(matched, judgement, born, policy, renames, missing, gained, unpaired, doubts=doubts)
    comparison = replace(comparison, options=request.options)
    if request.details and len(comparison):
        chosen = worth_a_look(judgement.born, pairs.error, judgement.tolerance, request.details)
        details = list(closeups.details(chosen, request.details, request.progress))
        comparison = replace(comparison, details=details, notes=[*comparison.notes, *damage_in(details)])
    return comparison, closeups
