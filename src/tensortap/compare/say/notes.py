"""The notes beside a verdict: what differs and is no mistake, and what could not be judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tensortap.compare.align.alignment import Renames, suggest
from tensortap.compare.align.calls import argument_notes
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.recomputations import changed_recomputations
from tensortap.compare.judge.rules.names import MOST_CAME_IN, MOVED_TIES, NAIVE_SUM, OTHER_GELU, ROUNDING_INSIDE
from tensortap.compare.judge.rules.unseen import FITTED, KINKS_INSIDE, SATURATED, SHORT_INSIDE, UNDERFLOWS, UNEVEN_STEPS
from tensortap.compare.judge.ties import FOLLOWS_TIE, TIE_UNKNOWN
from tensortap.compare.judge.unread import UNREAD, UNREAD_PADDING, UNREAD_ROUGHLY
from tensortap.compare.matched import Matched
from tensortap.compare.measure.hidden import FOLLOWS_HIDDEN, UNREAD_POSITIONS
from tensortap.compare.measure.measures import OTHER_LAYOUT
from tensortap.compare.measure.token_order import OTHER_ORDER
from tensortap.compare.say import beside
from tensortap.compare.say.formatting import rounded
from tensortap.compare.say.loop import loop_notes
from tensortap.compare.say.operators import operator_notes
from tensortap.compare.translate.fused import Fusion
from tensortap.compare.translate.mapped import frameworks_differ, words_of
from tensortap.core.records import Finding, display_name

__all__ = ["count_unjudged_by_ties", "notes_of"]

_FEW = 3


def notes_of(matched: Matched, judgement: Judgement, renames: Renames, births: list[Finding]) -> list[str]:
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
    notes += _kinks(matched, judgement) + _other_gelus(births, judgement)
    notes += _choices(matched, judgement) + _unread(judgement) + _doubted(matched, judgement)
    notes += [
        f"the recomputation in {display_name(fact.of)} makes other values than its first forward in the reference"
        for _, fact in changed_recomputations(left)
    ][:_FEW]
    notes += beside.dtype_note(matched)
    notes += beside.tie_notes(matched.settings.ties, births[0] if births else None)
    unseen = not births and beside.are_buffers_unseen(matched)
    notes += beside.attribute_notes(matched.settings, [birth.module for birth in births[:1]], not births, unseen)
    notes += loop_notes(matched.settings.loop)
    notes += _limits(matched, judgement) + _positions_that_see_nothing(matched, births)
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
        f"{rounded(kink.rel_l2)}{so_too}"
    ]


def _other_gelus(births: list[Finding], judgement: Judgement) -> list[str]:
    """Return a note on the first module that is found by which GELU it computes: its numbers are within rounding."""
    named = [birth for birth in births if birth.row is not None and judgement.rule[birth.row] == OTHER_GELU]
    return [f"{display_name(birth.module)}: {OTHER_GELU}" for birth in named[:1]]


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
        chosen = "chose another code" if choice.of_codes else "chose another expert"
        what = "chose their experts in another order" if choice.reordered else chosen
        which = f"{about}{choice.changed:,} of {choice.tokens:,} token{'s' * (choice.tokens > 1)}"
        lines.append(f"{which} {what} ({key}); {scores}{advice}")
    if times := count_unjudged_by_ties(judgement):
        lines.append(f"not judged: {times:,} pair{'s' * (times > 1)}; {FOLLOWS_TIE}")
    return lines


def count_unjudged_by_ties(judgement: Judgement) -> int:
    """Count the pairs that could not be judged because of a changed choice."""
    return sum(judgement.rule[row] in (TIE_UNKNOWN, FOLLOWS_TIE) for row in judgement.unjudged)


def _unread(judgement: Judgement) -> list[str]:
    """Return a note on differences that nothing reads."""
    counts = {why: judgement.rule.count(why) for why in (UNREAD, UNREAD_PADDING, UNREAD_ROUGHLY, FOLLOWS_HIDDEN)}
    notes = [
        f"not judged: {times:,} pair{'s' * (times > 1)} that begin in the forward pass; {why}"
        for why, times in counts.items()
        if times
    ]
    if times := judgement.rule.count(OTHER_ORDER):
        notes.append(f"not judged: {times:,} pair{'s' * (times > 1)}; {OTHER_ORDER}")
    return notes


def _doubted(matched: Matched, judgement: Judgement) -> list[str]:
    """Return notes on gradients that are off by more than is allowed, and may be right all the same."""
    notes = []
    advice = "measure it with tensortap.noise"
    unseen = 'capture with compiled="inside" or "eager"'
    advised = {NAIVE_SUM: "", MOVED_TIES: "", ROUNDING_INSIDE: advice, MOST_CAME_IN: advice, KINKS_INSIDE: unseen}
    advised |= {SHORT_INSIDE: advice, UNDERFLOWS: "scale the loss, or compare in float32"}
    advised |= {FITTED: "compare in one dtype", SATURATED: "compare in one dtype"}
    advised[UNEVEN_STEPS] = 'capture with keep="tensors"'
    for rule, to_do in advised.items():
        rows = [row for row in judgement.unjudged if judgement.rule[row] == rule]
        if rows:
            worst = max(rows, key=lambda row: float(matched.measures.rel_l2[row]))
            key = matched.reference.key(int(matched.alignment.reference[worst]))
            off = rounded(float(matched.measures.rel_l2[worst]))
            more = f", and {len(rows) - 1:,} more" if len(rows) > 1 else ""
            notes.append(f"not judged: {key}, off by {off}{more}; {rule}{to_do and f': {to_do}'}")
    return notes


def _masks(matched: Matched) -> list[str]:
    """Return a note on masks that the sides hold in two conventions and that hide the same."""
    side, rows = matched.reference, matched.alignment.reference
    alike: dict[tuple[str, str], list[int]] = {}
    for pair, mask in matched.measures.masks.items():
        if not mask.differing and mask.words[0] != mask.words[1] and pair not in matched.measures.limits:
            alike.setdefault(mask.words, []).append(pair)
    lines = []
    for (ours, theirs), pairs in alike.items():
        key, more = side.key(int(rows[pairs[0]])), len(pairs) - 1
        named = f"{key.kind} {key.path} of {display_name(key.module)}" + (f" and {more:,} more" if more else "")
        lines.append(
            f"masks that hide the same elements: {ours} in the reference and {theirs} in the candidate ({named})"
        )
    return lines


def _positions_that_see_nothing(matched: Matched, births: list[Finding]) -> list[str]:
    """Return a note if the first finding may only be what attention makes of padding before a text."""
    first = births[0].row if births else None
    if first is None or matched.measures.exact[first]:
        return []
    side, rows, masks = matched.reference, matched.alignment.reference, matched.measures.masks
    given = {side.module[int(rows[pair])] for pair, mask in masks.items() if mask.frees_positions}
    inputs = rows[side.kind.among(("input",))[rows] & side.module.among(("",))[rows]].tolist()
    padded = any("mask" in side.path[row] and side.zeros[row] for row in inputs)
    if births[0].module not in given or not padded:
        return []
    return [
        "if the batch has padding before its texts, two kinds of attention differ at positions that see nothing, and "
        'summaries show neither whether that is all nor what is wrong behind it: capture with keep="tensors"'
    ]


def _limits(matched: Matched, judgement: Judgement) -> list[str]:
    """Return notes on why pairs could not be judged, most of them from their summaries."""
    limits = [(pair, why) for pair, why in matched.measures.limits.items() if why != OTHER_LAYOUT]
    reasons = Counter(why for pair, why in limits if judgement.status[pair] == "unjudged")
    advice = '; capture with keep="tensors"'
    return [
        f"{times:,} pair{'s' * (times > 1)} could not be judged: {why}{advice * (why != UNREAD_POSITIONS)}"
        for why, times in reasons.items()
    ]


def _fused(found: Sequence[Fusion]) -> list[str]:
    """Modules that include others, a line each for the first few."""
    words = list(dict.fromkeys(fusion.words() for fusion in found))
    more = [f"so it is with {len(words) - _FEW:,} more modules"] if len(words) > _FEW else []
    return words[:_FEW] + more


def _names_alone(matched: Matched) -> str:
    """Name a module of each side that the other lacks; empty if both have the same ones."""
    ours, theirs = matched.reference.module.words, matched.candidate.module.words
    only_ours, only_theirs = set(ours) - set(theirs), set(theirs) - set(ours)
    if not only_ours or not only_theirs:
        return ""
    one, other = next(filter(only_ours.__contains__, ours)), next(filter(only_theirs.__contains__, theirs))
    return f"{display_name(one)} of the reference and {display_name(other)} of the candidate"
