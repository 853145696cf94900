"""The result of a comparison: its verdict, with sentence, notes, table and the records that only one side has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tensortap.compare.align.alignment import Renames, suggest
from tensortap.compare.align.incomplete import incomplete_runs
from tensortap.compare.align.ranks import UnpairedRanks, other_worlds
from tensortap.compare.join.evidence import NO_PARALLEL_EVIDENCE, ParallelEvidence
from tensortap.compare.judge.first_operator import with_operators
from tensortap.compare.judge.judged_elsewhere import all_judged_elsewhere
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.overflow import OVERFLOWS
from tensortap.compare.judge.precision import NO_PRECISION, Precision
from tensortap.compare.judge.read_hidden import READ_HIDDEN
from tensortap.compare.judge.rules.names import MOST_CAME_IN, ROUNDING_INSIDE
from tensortap.compare.judge.rules.rounding import EPSILON, Policy
from tensortap.compare.judge.rules.unseen import FITTED, KINKS_INSIDE, SATURATED, SHORT_INSIDE, UNDERFLOWS, UNEVEN_STEPS
from tensortap.compare.judge.ties import FOLLOWS_TIE, TIE_UNKNOWN
from tensortap.compare.judge.unread import UNREAD_ROUGHLY
from tensortap.compare.matched import Matched
from tensortap.compare.memory import release_unused
from tensortap.compare.say.formatting import rounded
from tensortap.compare.say.loop import describe_settings
from tensortap.compare.say.notes import count_unjudged_by_ties, notes_of
from tensortap.compare.say.open_verdicts import (
    describe_none_judged,
    describe_open,
    describe_open_ties,
    describe_overflow,
    describe_read_hidden,
    describe_too_little,
    describe_undecided,
    describe_unrelated,
    describe_unsupported,
    ways_to_tell,
)
from tensortap.compare.say.precision import (
    describe_doubtful,
    describe_hidden,
    describe_less_exact,
    describe_without_truth,
)
from tensortap.compare.say.result_sentence import sentence_of, several_ranks
from tensortap.compare.say.table import table_of
from tensortap.compare.translate.certainty import NO_DOUBTS, Doubts
from tensortap.compare.translate.mapped import frameworks_differ
from tensortap.core.records import Comparison, Finding, Unmatched, Verdict

__all__ = ["conclude"]

_MOST_UNMATCHED = 10_000
_LEAST_SHARE = 0.1
_FEW = 3
_FAR = 2.0**-5
"""Relative error from which on rounding inside a module is no reason to call it a match: 4 epsilons of bfloat16."""


def conclude(
    matched: Matched,
    judgement: Judgement,
    born: Sequence[Finding],
    policy: Policy,
    renames: Renames,
    missing: Mapping[int, Finding],
    extra: Mapping[tuple[int, float], Finding],
    unpaired: UnpairedRanks,
    isolated: bool = False,
    doubts: Doubts = NO_DOUBTS,
    precision: Precision = NO_PRECISION,
    parallel: ParallelEvidence = NO_PARALLEL_EVIDENCE,
) -> Comparison:
    """Build the comparison from the judgement and the births.

    missing: gradients that the candidate lacks, by the reference's row.
    extra: gradients that only the candidate has, by step and position in the reference's order.
    unpaired: ranks that were not compared; without a divergence elsewhere, they make the verdict "incomparable".
    isolated: every module ran on the reference's own inputs.
    precision: what a truth says about both sides.
    parallel: what joining the ranks of both sides found.
    """
    left, right, alignment, measures = matched.reference, matched.candidate, matched.alignment, matched.measures
    rows = alignment.reference
    known = {int(rows[finding.row]): finding for finding in born if finding.row is not None} | dict(missing)
    placed = [((int(left.step[row]), float(left.seq[row])), finding) for row, finding in known.items()]
    births = [finding for _, finding in sorted([*placed, *extra.items()], key=lambda each: each[0])]
    births = with_operators([_with_truth(finding, precision) for finding in births], matched, judgement)
    at_fault = {finding.module for finding in births}
    less_exact = [finding for finding in precision.findings if finding.module not in at_fault]
    counts = judgement.counts
    one_sided = len(alignment.only_reference) + len(alignment.only_candidate)
    if one_sided:
        counts["unmatched"] = one_sided
    pairs = len(rows)
    incomplete = ", and ".join(filter(None, (incomplete_runs(matched), parallel.unjudged())))
    verdict: Verdict = "diverged" if births else "incomparable" if unpaired or incomplete else "match"
    judged = pairs > counts["unjudged"]
    ours, theirs = (sum(each) for each in zip(matched.splits.left_out, matched.patterns.left_out, strict=True))
    comparable = min(unpaired.compared(left, "reference") - ours, unpaired.compared(right, "candidate") - theirs)
    unrelated = _unrelated(matched)
    too_few = not pairs or pairs < _LEAST_SHARE * max(1, comparable) or bool(unrelated)
    if too_few or not judged:
        verdict = "incomparable"
    guessed = [doubts.words(matched.plan)] if matched.plan is not None and doubts.modules else []
    if too_few:
        said = unrelated or describe_too_little(len(left), len(right), pairs, unpaired.in_words())
    elif not judged:
        said = describe_none_judged(pairs)
    else:
        said = sentence_of(births, matched, judgement, counts, _in_words(unpaired, incomplete), isolated)
    if verdict == "match" and doubts.undecided:
        verdict, said = "incomparable", describe_undecided(guessed[0])
        guessed = []
    if matched.splits.micros and not too_few:
        if verdict == "match" and not matched.splits.gradients:
            verdict, said = "incomparable", f"Too little in common to judge. {said}"
        said += f" {matched.splits.words()}."
    short = any(EPSILON.get(name, 0.0) > EPSILON["float32"] for side in (left, right) for name in side.dtype.words)
    checked = isolated or frameworks_differ(left.run, right.run)
    ways = ways_to_tell(checked, len(np.unique(left.step[rows])) > 1, short)
    covered = verdict == "match" and _are_covered(matched, judgement)
    if verdict == "match" and not covered and (open_ties := count_unjudged_by_ties(judgement)):
        verdict, said = "incomparable", describe_open_ties(open_ties, ways, said)
    if verdict == "match" and READ_HIDDEN in judgement.rule:
        verdict, said = "incomparable", describe_read_hidden(said)
    if verdict in ("match", "incomparable") and (overflow := _overflow(matched, judgement)):
        verdict, said = "incomparable", overflow + (f" {said}" if judged else "")
    if verdict == "match" and not covered and (doubted := _far_off(matched, judgement, precision)):
        verdict, said = "incomparable", describe_open(doubted, ways, said)
    if verdict == "match" and judgement.unsupported:
        verdict, said = "incomparable", f"{_unsupported(matched, judgement)} {said}"
    if less_exact and verdict == "match":
        verdict, finding = "imprecise", describe_less_exact(less_exact, several_ranks(matched))
        said = f"{finding} Within tolerance, {said[0].lower()}{said[1:]}"
    doubtful = [each for each in precision.doubtful if each.module not in {found.module for found in births}]
    if doubtful and verdict == "match":
        verdict, doubt = "incomparable", describe_doubtful(doubtful, several_ranks(matched), isolated)
        said = f"{doubt} Within tolerance, {said[0].lower()}{said[1:]}"
    if precision.hidden and verdict in ("match", "imprecise"):
        said += f" {describe_hidden(precision.hidden)}"
    if precision.unjudged and verdict in ("match", "imprecise"):
        said += f" {describe_without_truth(precision.unjudged)}"
    notes = [*guessed, *([unpaired.note()] if unpaired else []), *parallel.notes(births)]
    notes += [note for note in notes_of(matched, judgement, renames, births) if note not in said]
    if not unpaired and not isolated and not parallel.joining and (worlds := other_worlds(left.run, right.run)):
        notes.append(f"{worlds}; only ranks with records were compared")
    if matched.splits.micros and too_few:
        notes.append(matched.splits.words())
    if less_exact and verdict != "imprecise":
        notes.append(describe_less_exact(less_exact, several_ranks(matched)))
    notes += precision.notes
    if verdict == "imprecise":  # beside a mistake, a module that rounds more is not to be fixed first
        births += less_exact
    release_unused()  # for the table
    first = births[0] if births and verdict in ("diverged", "imprecise") else None
    return Comparison(
        reference=str(left.run.path),
        candidate=str(right.run.path),
        verdict=verdict,
        sentence=said,
        first=first,
        births=births,
        counts=dict(counts),
        unmatched=parallel.reasons(_unmatched(matched)),
        table=table_of(left, right, alignment, measures, judgement, [*born, *less_exact], precision.errors),
        policy=policy.described(),
        notes=notes,
        info={"reference": left.run.info, "candidate": right.run.info},
        mapping=None if matched.plan is None else matched.plan.report(),
        isolated=isolated,
        unpaired_ranks=unpaired.by_side(),
    )


def _with_truth(finding: Finding, precision: Precision) -> Finding:
    truth = None if finding.row is None else precision.errors.get(finding.row)
    return finding if truth is None else replace(finding, truth=truth)


def _in_words(unpaired: UnpairedRanks, incomplete: str) -> str:
    return ", and ".join(filter(None, (unpaired.in_words(), incomplete)))


def _unsupported(matched: Matched, judgement: Judgement) -> str:
    """Say that noise of parameters that were not recorded may explain what differs, or may not."""
    rows = np.array(sorted(judgement.unsupported))
    left, ours = matched.reference, matched.alignment.reference[rows]
    worst = int(np.argmax(matched.measures.rel_l2[rows]))
    off, key = float(matched.measures.rel_l2[rows[worst]]), str(left.key(int(ours[worst])))
    first = int(left.step[ours].min())
    has_settings = bool(left.run.loop(int(left.rank[ours[0]])).subjects("group"))
    return describe_unsupported(len(rows), first, off, key, has_settings) + describe_settings(matched, first)


def _are_covered(matched: Matched, judgement: Judgement) -> bool:
    """Whether all pairs that changed choices or errors left unjudged match in other steps."""
    open_rules = (TIE_UNKNOWN, FOLLOWS_TIE, MOST_CAME_IN)
    never_covered = (
        UNREAD_ROUGHLY,
        ROUNDING_INSIDE,
        KINKS_INSIDE,
        SHORT_INSIDE,
        UNDERFLOWS,
        UNEVEN_STEPS,
        FITTED,
        SATURATED,
    )
    if any(judgement.rule[row] in never_covered for row in judgement.unjudged):
        return False
    rows = [row for row in judgement.unjudged if judgement.rule[row] in open_rules]
    return all_judged_elsewhere(rows, judgement, matched.reference, matched.alignment)


def _far_off(matched: Matched, judgement: Judgement, precision: Precision) -> str:
    """Name the worst pair that rounding may explain and that is too far off to call it a match; empty if none is.

    A truth shows how far rounding moved each side, so a pair that has one is not in doubt for that.
    """
    rows = [
        row
        for row in judgement.unjudged
        if judgement.rule[row]
        in (MOST_CAME_IN, UNREAD_ROUGHLY, SHORT_INSIDE, UNDERFLOWS, UNEVEN_STEPS, FITTED, SATURATED)
        or (judgement.rule[row] in (ROUNDING_INSIDE, KINKS_INSIDE) and matched.measures.rel_l2[row] > _FAR)
    ]
    rows = [
        row for row in rows if row not in precision.errors or judgement.rule[row] not in (SHORT_INSIDE, ROUNDING_INSIDE)
    ]
    if not rows:
        return ""
    known = [row for row in rows if matched.measures.rel_l2[row] < float("inf")]  # not if the reference is zero
    worst = max(known or rows, key=lambda row: float(matched.measures.rel_l2[row]))
    off = rounded(float(matched.measures.rel_l2[worst]))
    key = matched.reference.key(int(matched.alignment.reference[worst]))
    more = f" and {len(rows) - 1:,} more are" if len(rows) > 1 else " is"
    return f"{key}{more} off by up to {off}, and {judgement.rule[worst]}"


def _overflow(matched: Matched, judgement: Judgement) -> str:
    """Say that the verdict is open because one side's numbers overflow; empty if none do."""
    rows = [row for row in judgement.unjudged if judgement.rule[row] == OVERFLOWS]
    if not rows:
        return ""
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    first = min(
        rows, key=lambda row: (int(left.step[alignment.reference[row]]), int(left.seq[alignment.reference[row]]))
    )
    ours, theirs = int(alignment.reference[first]), int(alignment.candidate[first])
    broken = int(right.nan[theirs] + right.posinf[theirs] + right.neginf[theirs])
    name, dtype = ("candidate", right.dtype[theirs]) if broken else ("reference", left.dtype[ours])
    return describe_overflow(str(left.key(ours)), name, dtype, len(rows))


def _unrelated(matched: Matched) -> str:
    """Say that the runs are of two models, if they have nothing in common but the root; else return nothing."""
    left, right = matched.reference, matched.candidate
    ours, theirs = set(left.module.words), set(right.module.words)
    if matched.plan is not None or ours & theirs != {""} or min(len(ours), len(theirs)) < _FEW:
        return ""
    roots = [next(side.cls[int(row)] for row in np.flatnonzero(side.module.among(("",)))[:1]) for side in (left, right)]
    if roots[0] == roots[1] or suggest(left, right):
        return ""
    return describe_unrelated(*roots)


def _unmatched(matched: Matched) -> list[Unmatched]:
    found = []
    alignment = matched.alignment
    for name, side, rows in (
        ("reference", matched.reference, alignment.only_reference),
        ("candidate", matched.candidate, alignment.only_candidate),
    ):
        for row in rows[:_MOST_UNMATCHED].tolist():
            key = side.key(row)
            own = int(name == "candidate")
            why = matched.fusions.why(own, key)
            if not why and matched.plan is not None:
                why = matched.plan.why(own, key.module, key.kind, key.path)
            found.append(Unmatched(name, key, int(side.rank[row]), side.cls[row], why))  # type: ignore[arg-type]
    return found
