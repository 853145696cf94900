"""The result of a comparison: verdict, sentence, notes, table, and the records that only one side has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tensortap.compare.align.alignment import Renames, suggest
from tensortap.compare.align.calls import argument_notes
from tensortap.compare.align.distinct import distinct
from tensortap.compare.align.incomplete import incomplete_runs
from tensortap.compare.align.ranks import UnpairedRanks, other_worlds
from tensortap.compare.align.side import Side
from tensortap.compare.join.evidence import NO_PARALLEL_EVIDENCE, ParallelEvidence
from tensortap.compare.judge.first_operator import with_operators
from tensortap.compare.judge.judging import Judgement
from tensortap.compare.judge.precision import NO_PRECISION, Precision
from tensortap.compare.judge.recomputations import changed_recomputations
from tensortap.compare.judge.rules import MOST_CAME_IN, MOVED_TIES, NAIVE_SUM, ROUNDING_INSIDE
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.ties import FOLLOWS_TIE, TIE_UNKNOWN
from tensortap.compare.judge.unread import UNREAD, UNREAD_PADDING
from tensortap.compare.matching import Matched
from tensortap.compare.measure.measures import OTHER_LAYOUT
from tensortap.compare.say import beside, sentence
from tensortap.compare.say.loop import describe_loop, describe_uncleared, loop_notes
from tensortap.compare.say.operators import describe_operator, operator_notes
from tensortap.compare.say.precision import describe_less_exact, describe_truth
from tensortap.compare.say.table import table_of
from tensortap.compare.translate.certainty import NO_DOUBTS, Doubts
from tensortap.compare.translate.fused import Fusion
from tensortap.compare.translate.mapped import frameworks_differ, words_of
from tensortap.core.causes import Cause
from tensortap.core.records import Comparison, Finding, Unmatched, Verdict, display_name

__all__ = ["conclude"]

_MOST_UNMATCHED = 10_000
_LEAST_SHARE = 0.1
_FEW = 3
_FAR = 2.0**-5
"""Relative error from which on rounding inside a module is no reason to call it a match: 4 epsilons of bfloat16."""
_LARGE = 0.1
"""Relative error from which on a close pair needs words: such a tensor consists mostly of rounding."""


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
        said = unrelated or sentence.describe_too_little(len(left), len(right), pairs, unpaired.in_words())
    elif not judged:
        said = sentence.describe_none_judged(pairs)
    else:
        said = _sentence(births, matched, judgement, counts, _in_words(unpaired, incomplete), isolated)
    if verdict == "match" and doubts.undecided:
        verdict, said = "incomparable", sentence.describe_undecided(guessed[0])
        guessed = []
    if matched.splits.micros and not too_few:
        if verdict == "match" and not matched.splits.gradients:
            verdict, said = "incomparable", f"Too little in common to judge. {said}"
        said += f" {matched.splits.words()}."
    if verdict == "match" and (open_ties := _unjudged_by_ties(judgement)):
        verdict, said = "incomparable", sentence.describe_open_ties(open_ties, said)
    if verdict == "match" and (doubted := _far_off(matched, judgement)):
        verdict, said = "incomparable", f"Cannot tell whether the runs match: {doubted}. {said}"
    if verdict == "match" and judgement.unsupported:
        verdict, said = "incomparable", f"{_unsupported(matched, judgement)} {said}"
    if less_exact and verdict == "match":
        verdict = "imprecise"
        said = f"{describe_less_exact(less_exact, _several(matched))} Within tolerance, {said[0].lower()}{said[1:]}"
    notes = [*guessed, *([unpaired.note()] if unpaired else []), *parallel.notes(births)]
    notes += _notes(matched, judgement, renames, births)
    if not unpaired and not isolated and not parallel.joining and (worlds := other_worlds(left.run, right.run)):
        notes.append(f"{worlds}; only ranks with records were compared")
    if matched.splits.micros and too_few:
        notes.append(matched.splits.words())
    if less_exact and verdict != "imprecise":
        notes.append(describe_less_exact(less_exact, _several(matched)))
    notes += precision.notes
    births += less_exact
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


def _sentence(
    births: Sequence[Finding],
    matched: Matched,
    judgement: Judgement,
    counts: Mapping[str, int],
    left_out: str,
    isolated: bool,
) -> str:
    left, right = matched.reference, matched.candidate
    if not births:
        return _agreement(matched, judgement, counts, left_out, isolated)
    first, several = births[0], _several(matched)
    tensors = None if first.row is None else _compared_tensors(matched, first.row)
    if isolated:
        said = sentence.describe_isolated(births, tensors, several) + sentence.describe_call(first)
        return said + _beside(first, matched)
    forward = _forward(matched, judgement, first)
    candidate = str(right.run.info["framework"]) if frameworks_differ(left.run, right.run) else "the candidate"
    steps = _other_steps(matched, first.key.step)
    divergence = sentence.describe_divergence(births, tensors, several, forward, candidate, ran_alike=not steps)
    if first.row is None or first.cause is Cause.CHECKPOINT:
        return divergence + describe_operator(first)
    if _parameters_unseen(left, first):
        unseen = sentence.describe_unseen_parameters()
    elif not first.arguments and first.module not in matched.settings.attributes and _start_unseen(left, first):
        unseen = sentence.describe_unseen_start()
    else:
        unseen = sentence.describe_hidden_optimizer(_hidden(matched, judgement, first.key.step))
    if left.is_selection:
        divergence, unseen = sentence.about_selection(divergence), sentence.about_selection(unseen)
    return divergence + sentence.describe_call(first) + _beside(first, matched) + (steps or unseen)


def _beside(first: Finding, matched: Matched) -> str:
    """Return what the attributes, the training loop, the dtype and a truth add about the first finding."""
    settings = beside.describe_attributes(first, matched.settings) + describe_loop(first, matched.settings.loop)
    settings += describe_uncleared(first, matched) + beside.describe_order(first, matched)
    return describe_operator(first) + settings + beside.describe_dtype(first, matched) + describe_truth(first.truth)


def _several(matched: Matched) -> bool:
    """Whether several ranks took part."""
    return max(len(matched.reference.ranks), len(matched.candidate.ranks)) > 1


def _with_truth(finding: Finding, precision: Precision) -> Finding:
    truth = None if finding.row is None else precision.errors.get(finding.row)
    return finding if truth is None else replace(finding, truth=truth)


def _in_words(unpaired: UnpairedRanks, incomplete: str) -> str:
    return ", and ".join(filter(None, (unpaired.in_words(), incomplete)))


def _agreement(matched: Matched, judgement: Judgement, counts: Mapping[str, int], left_out: str, isolated: bool) -> str:
    """Say that all compared pairs match, and what was `left_out`."""
    steps = "" if isolated else _other_steps(matched)
    unjudged = bool(counts.get("unjudged"))
    agree = "Everything that both runs have matches" if steps else "The runs match"
    if judgement.unsupported:
        agree = "As far as the records show, everything agrees"
    agree = "Everything that could be judged matches" if unjudged else agree
    if left_out:
        what = "could be judged" if unjudged else "was compared"
        agree = f"Too little in common to judge: {left_out}. Everything that {what} matches"
    elif isolated:
        agree = "Every module agrees on the reference's own inputs" + " as far as it could be judged" * unjudged
    if not counts.get("close"):
        return sentence.describe_match(counts, None, agree) + steps + beside.describe_uncompared(matched, True)
    uncompared = beside.describe_uncompared(matched, optimizer=not judgement.unsupported)
    return sentence.describe_match(counts, _worst(matched, judgement), agree) + steps + uncompared


def _worst(matched: Matched, judgement: Judgement) -> str:
    """Say how far off the worst close pair is. Pairs that are large only because little is left of them come apart."""
    measures, left, rows = matched.measures, matched.reference, matched.alignment.reference
    close = judgement.having("close")
    off = np.where(close & ~np.isnan(measures.rel_l2), measures.rel_l2, -1.0)
    alone = np.isin(np.arange(len(off)), list(judgement.cancelling)) & (off >= 0)
    large = (off > _LARGE) & ~alone
    parts = []
    if (off[~large & ~alone] >= 0).any():
        worst = int(np.argmax(np.where(large | alone, -1.0, off)))
        parts.append(sentence.describe_worst(float(off[worst]), str(left.key(int(rows[worst])))))
    if large.any():
        worst = int(np.argmax(np.where(large, off, -1.0)))
        words = float(off[worst]), str(left.key(int(rows[worst]))), judgement.rule[worst]
        parts.append(sentence.describe_large(int(large.sum()), *words, alone=not parts))
    if alone.any():
        key = str(left.key(int(rows[np.argmax(alone)])))
        parts.append(sentence.describe_rounding_alone(int(alone.sum()), key, alone=not parts))
    return "; ".join(parts)


def _hidden(matched: Matched, judgement: Judgement, until: int) -> float | None:
    """Return the largest tolerance up to a step that is due to unrecorded parameters; None if no pair needed it."""
    rows = sorted(judgement.unsupported)
    steps = matched.reference.step[matched.alignment.reference[rows]].tolist()
    allowed = [float(judgement.tolerance[row]) for row, step in zip(rows, steps, strict=True) if step <= until]
    return max(allowed, default=None)


def _unsupported(matched: Matched, judgement: Judgement) -> str:
    """Say that noise of parameters that were not recorded may explain what differs, or may not."""
    rows = np.array(sorted(judgement.unsupported))
    left, ours = matched.reference, matched.alignment.reference[rows]
    worst = int(np.argmax(matched.measures.rel_l2[rows]))
    off, key = float(matched.measures.rel_l2[rows[worst]]), str(left.key(int(ours[worst])))
    return sentence.describe_unsupported(len(rows), int(left.step[ours].min()), off, key)


def _other_steps(matched: Matched, until: int | None = None) -> str:
    """Say that one side lacks steps, or ran one more often, up to a step. Shifted steps are not mentioned."""
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    if not len(alignment.only_reference) and not len(alignment.only_candidate):
        return ""
    if left.run.is_checkpoint or right.run.is_checkpoint:
        return ""
    if np.any(left.step[alignment.reference] != right.step[alignment.candidate]):
        return ""
    backward = all("backward" in side.phase.words for side in (left, right))
    return sentence.describe_other_steps(*(_times(side, backward, until) for side in (left, right)))


def _times(side: Side, backward: bool, until: int | None) -> dict[int, int]:
    """Count how often each step ran, up to a step. With `backward`, count only passes that have one."""
    ran = side.phase.among(("backward",)) if backward else ~side.phase.among(("eval",))
    if until is not None:
        ran &= side.step <= until
    return dict(Counter(step for step, _ in distinct(side.step[ran], side.micro[ran])))


def _parameters_unseen(side: Side, first: Finding) -> bool:
    """Whether a module may be wrong because of its parameters, which an earlier step changed unrecorded.

    The earlier step need not take part: `--step`, or `steps=` of a capture, may have left it out.
    """
    key = first.key
    if key.kind not in ("input", "output") or not first.inputs_matched or not key.step:
        return False
    if first.module not in side.module.words:  # a container of which nothing was recorded
        return False
    own = np.flatnonzero(side.module.codes == side.module.words.index(first.module))
    kinds = set(side.kind.at(own))
    if "param" in kinds:
        return False
    return first.module in side.frozen or "param_grad" in kinds or "param_grad" not in side.kind.words


def _start_unseen(side: Side, first: Finding) -> bool:
    """Whether the first module that is wrong in the first step may have got other parameters from the start."""
    if first.cause is not Cause.OUTPUT or first.key.step != int(side.step.min()):
        return False
    if first.module not in side.module.words:
        return False
    own = np.flatnonzero(side.module.codes == side.module.words.index(first.module))
    kinds = set(side.kind.at(own))
    return "param" not in kinds and (first.module in side.frozen or "param_grad" in kinds)


def _compared_tensors(matched: Matched, pair: int) -> tuple[sentence.ComparedTensor, sentence.ComparedTensor]:
    """Return what a sentence needs to know about the reference's tensor and the candidate's."""
    rows = matched.alignment.reference[pair], matched.alignment.candidate[pair]
    ours, theirs = (
        sentence.ComparedTensor(
            side.shape(int(row)), int(counts["nan"][pair] + counts["inf"][pair]), float(counts["l2"][pair])
        )
        for side, row, counts in zip(
            (matched.reference, matched.candidate),
            rows,
            (matched.measures.sides[name] for name in ("reference", "candidate")),
            strict=True,
        )
    )
    return ours, theirs


def _forward(matched: Matched, judgement: Judgement, first: Finding) -> str:
    """Say that the forward pass of a finding's step agrees; empty if it was not recorded."""
    side, rows = matched.reference, matched.alignment.reference
    passed = rows[(side.phase.among(("forward",)) & (side.step == first.key.step) & (side.rank == first.rank))[rows]]
    if not len(passed):
        return ""
    unjudged = judgement.having("unjudged")[np.isin(rows, passed)]
    return sentence.forward_agrees(bool(unjudged.any()))


def _notes(matched: Matched, judgement: Judgement, renames: Renames, births: list[Finding]) -> list[str]:
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    ours, theirs = left.run.notices, right.run.notices
    notes = [f"{'both runs' if text in theirs else 'reference'}: {text}" for text in ours]
    notes += [f"candidate: {text}" for text in theirs if text not in ours]
    one_sided = len(alignment.only_reference) + len(alignment.only_candidate)
    sides = ("reference", left, "candidate"), ("candidate", right, "reference")
    notes += [
        f"the {name} has records of an evaluation and the {other} has none: they were not compared"
        for name, side, other in sides
        if side.without_evaluation
    ]
    if matched.plan is not None:
        if births and births[0].cls.startswith("Dropout") and frameworks_differ(left.run, right.run):
            notes.append("dropout draws other numbers in each framework: set its rate to 0 on both sides")
        notes += words_of(matched.plan)
        notes += _fused(matched.fusions.found)
        if matched.repeated:
            one = left.key(int(alignment.reference[matched.repeated[0]]))
            notes.append(
                f"the shapes of {len(matched.repeated):,} values differ in axes that one side repeats, as {one}: "
                "compared as the other side would broadcast them"
            )
        if OTHER_LAYOUT in matched.measures.limits.values():
            notes.append(
                'the summary of a tensor in another layout shows only norms and counts; capture with keep="tensors"'
            )
    elif one_sided > len(alignment.reference) // 4 and not renames and (rules := suggest(left, right)):
        options = " ".join(f"--rename '{rule}'" for rule in rules)
        notes.append(f"many names are on one side only; try {options}")
    elif one_sided > len(alignment.reference) // 4 and (alone := _names_alone(matched)):
        notes.append(f"many names are on one side only, as {alone}: --map with an empty file maps by structure")
    notes += [matched.patterns.words()] if matched.patterns.calls else []
    notes += operator_notes(matched)
    notes += _masks(matched)
    notes += _kinks(matched, judgement)
    notes += _choices(matched, judgement) + _unread(judgement) + _doubted(matched, judgement)
    notes += [
        f"the recomputation in {display_name(fact.of)} makes other values than its first forward in the reference"
        for _, fact in changed_recomputations(left)
    ][:_FEW]
    notes += beside.dtype_note(matched) + beside.tie_notes(matched.settings.ties)
    notes += beside.attribute_notes(matched.settings, [birth.module for birth in births[:1]], matches=not births)
    notes += loop_notes(matched.settings.loop, births[0] if births else None)
    notes += _limits(matched, judgement)
    if births and np.any(~matched.measures.exact & ~np.isnan(matched.measures.rel_l2)):
        notes.append('estimated from sketches; capture with keep="tensors" to measure every element')
    said = {birth.module for birth in births[:1] if birth.arguments}
    return notes + argument_notes(matched.calls.first_of_modules, said)


def _kinks(matched: Matched, judgement: Judgement) -> list[str]:
    """Return a note on gradients of which few elements crossed a kink, for the one with the most."""
    if not judgement.kinks:
        return []
    pair = max(judgement.kinks, key=lambda each: judgement.kinks[each].crossed)
    kink, more = judgement.kinks[pair], len(judgement.kinks) - 1
    key = matched.reference.key(int(matched.alignment.reference[pair]))
    so_too = f"; so it is with {more:,} more gradient{'s' * (more > 1)}" if more else ""
    about = "" if kink.exact else "about "
    return [
        f"{about}{kink.crossed:,} of {kink.elements:,} elements of {key} crossed a kink; the rest agrees to "
        f"{sentence.rounded(kink.rel_l2)}{so_too}"
    ]


def _choices(matched: Matched, judgement: Judgement) -> list[str]:
    """Return notes on choices that rounding may have decided: one for the tied ones, and one for the others."""
    lines = []
    for tied in (True, None):
        found = [pair for pair, choice in judgement.choices.items() if choice.tied is tied]
        if not found:
            continue
        pair = max(found, key=lambda each: judgement.choices[each].changed)
        choice, key = judgement.choices[pair], matched.reference.key(int(matched.alignment.reference[pair]))
        about = "" if choice.which is not None else "about "
        scores = "their scores differed by less than rounding" if tied else "whether their scores are tied is not known"
        advice = "" if choice.which is not None else '; capture with keep="tensors"'
        what = "chose their experts in another order" if choice.reordered else "chose another expert"
        which = f"{about}{choice.changed:,} of {choice.tokens:,} token{'s' * (choice.tokens > 1)}"
        lines.append(f"{which} {what} ({key}); {scores}{advice}")
    if times := _unjudged_by_ties(judgement):
        lines.append(f"not judged: {times:,} pair{'s' * (times > 1)}; {FOLLOWS_TIE}")
    return lines


def _unjudged_by_ties(judgement: Judgement) -> int:
    """Count the pairs that could not be judged because of a changed choice."""
    return sum(judgement.rule[row] in (TIE_UNKNOWN, FOLLOWS_TIE) for row in judgement.unjudged)


def _unread(judgement: Judgement) -> list[str]:
    """Return a note on differences that nothing reads."""
    counts = {why: judgement.rule.count(why) for why in (UNREAD, UNREAD_PADDING)}
    return [
        f"not judged: {times:,} pair{'s' * (times > 1)} that begin in the forward pass; {why}"
        for why, times in counts.items()
        if times
    ]


def _far_off(matched: Matched, judgement: Judgement) -> str:
    """Name the worst pair that rounding may explain and that is too far off to call it a match; empty if none is."""
    rows = [
        row
        for row in judgement.unjudged
        if judgement.rule[row] == MOST_CAME_IN
        or (judgement.rule[row] == ROUNDING_INSIDE and matched.measures.rel_l2[row] > _FAR)
    ]
    if not rows:
        return ""
    worst = max(rows, key=lambda row: float(matched.measures.rel_l2[row]))
    off = sentence.rounded(float(matched.measures.rel_l2[worst]))
    key = matched.reference.key(int(matched.alignment.reference[worst]))
    more = f" and {len(rows) - 1:,} more are" if len(rows) > 1 else " is"
    return f"{key}{more} off by up to {off}, and {judgement.rule[worst]}"


def _doubted(matched: Matched, judgement: Judgement) -> list[str]:
    """Return notes on gradients that are off by more than is allowed, and may be right all the same."""
    notes = []
    advice = "measure it with tensortap.noise"
    for rule, to_do in ((NAIVE_SUM, ""), (MOVED_TIES, ""), (ROUNDING_INSIDE, advice), (MOST_CAME_IN, advice)):
        rows = [row for row in judgement.unjudged if judgement.rule[row] == rule]
        if rows:
            worst = max(rows, key=lambda row: float(matched.measures.rel_l2[row]))
            key = matched.reference.key(int(matched.alignment.reference[worst]))
            off = sentence.rounded(float(matched.measures.rel_l2[worst]))
            more = f", and {len(rows) - 1:,} more" if len(rows) > 1 else ""
            notes.append(f"not judged: {key}, off by {off}{more}; {rule}{to_do and f': {to_do}'}")
    return notes


def _masks(matched: Matched) -> list[str]:
    """Return a note on masks that the sides hold in two conventions and that hide the same."""
    side, rows = matched.reference, matched.alignment.reference
    alike: dict[tuple[str, str], list[int]] = {}
    for pair, mask in matched.measures.masks.items():
        if not mask.differing and mask.words[0] != mask.words[1]:
            alike.setdefault(mask.words, []).append(pair)
    lines = []
    for (ours, theirs), pairs in alike.items():
        key, more = side.key(int(rows[pairs[0]])), len(pairs) - 1
        named = f"{key.kind} {key.path} of {display_name(key.module)}" + (f" and {more:,} more" if more else "")
        lines.append(
            f"masks that hide the same elements: {ours} in the reference and {theirs} in the candidate ({named})"
        )
    return lines


def _limits(matched: Matched, judgement: Judgement) -> list[str]:
    """Return notes on why summaries did not suffice to judge pairs."""
    limits = [(pair, why) for pair, why in matched.measures.limits.items() if why != OTHER_LAYOUT]
    reasons = Counter(why for pair, why in limits if judgement.status[pair] == "unjudged")
    return [
        f'{times:,} pair{"s" * (times > 1)} could not be judged: {why}; capture with keep="tensors"'
        for why, times in reasons.items()
    ]


def _fused(found: Sequence[Fusion]) -> list[str]:
    """Modules that include others, a line each for the first few."""
    words = list(dict.fromkeys(fusion.words() for fusion in found))
    more = [f"so it is with {len(words) - _FEW:,} more modules"] if len(words) > _FEW else []
    return words[:_FEW] + more


def _unrelated(matched: Matched) -> str:
    """Say that the runs are of two models, if they have nothing in common but the root; else return nothing."""
    left, right = matched.reference, matched.candidate
    ours, theirs = set(left.module.words), set(right.module.words)
    if matched.plan is not None or ours & theirs != {""} or min(len(ours), len(theirs)) < _FEW:
        return ""
    roots = [next(side.cls[int(row)] for row in np.flatnonzero(side.module.among(("",)))[:1]) for side in (left, right)]
    if roots[0] == roots[1] or suggest(left, right):
        return ""
    return sentence.describe_unrelated(*roots)


def _names_alone(matched: Matched) -> str:
    """Name a module of each side that the other lacks; empty if both have the same ones."""
    ours, theirs = matched.reference.module.words, matched.candidate.module.words
    only_ours, only_theirs = set(ours) - set(theirs), set(theirs) - set(ours)
    if not only_ours or not only_theirs:
        return ""
    one, other = next(filter(only_ours.__contains__, ours)), next(filter(only_theirs.__contains__, theirs))
    return f"{display_name(one)} of the reference and {display_name(other)} of the candidate"


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
