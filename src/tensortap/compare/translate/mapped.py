"""What a comparison asks of the mapping between two runs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tensortap.compare.align.alignment import Alignment, Renames
from tensortap.compare.align.side import Ints, Side
from tensortap.compare.judge.judging import Judgement
from tensortap.compare.translate.outlines import outline_of
from tensortap.compare.translate.translated import Translated
from tensortap.core.records import display_name
from tensortap.mapping.model_mapping import ModelMapping, map_models
from tensortap.mapping.outline import full_name
from tensortap.mapping.rules_file import read_rules
from tensortap.store import Run

__all__ = [
    "Allowance",
    "allowances",
    "explain",
    "frameworks_differ",
    "other_names",
    "plan_of",
    "reference_name",
    "without_ignored",
    "words_of",
]

_KNOWN = ("torch", "paddle")
_FEW = 3


def frameworks_differ(reference: Run, candidate: Run) -> bool:
    """Whether the two runs are of frameworks that name and lay out things differently."""
    frameworks = {run.info.get("framework") for run in (reference, candidate)}
    return frameworks == set(_KNOWN)


def plan_of(
    reference: Run,
    candidate: Run,
    renames: Renames,
    mapping: str | os.PathLike[str] | Mapping[str, Any] | None,
    known: Mapping[str, str] | None = None,
) -> ModelMapping | None:
    """Who belongs to whom; None if both runs speak the same language and nobody says otherwise. `known` is what values
    have shown of the candidate's modules."""
    rules = None if mapping is None else read_rules(mapping)
    if rules is None and not frameworks_differ(reference, candidate):
        return None
    (made, our_values), (given, their_values) = outline_of(reference), outline_of(candidate)
    return map_models(
        made, given, rules, rename=renames if renames else None, values=(our_values, their_values), known=known
    )


def reference_name(plan: ModelMapping, module: str) -> str:
    """What the reference calls a module of the candidate; a part of one that is, by that one's name."""
    if module in plan.modules:
        return plan.modules[module]
    around = next((name for name in plan.module_matches.source.above(module) if name in plan.modules), "")
    return plan.modules.get(around, module)


def other_names(plan: ModelMapping) -> dict[str, str]:
    """The reference's modules that the candidate calls something else."""
    return {ours: display_name(theirs) for ours, theirs in plan.module_matches.source_of.items() if ours != theirs}


def without_ignored(alignment: Alignment, reference: Side, plan: ModelMapping) -> Alignment:
    """What a rule says has no counterpart is not missing."""
    rows = alignment.only_reference
    spots = zip(reference.module.at(rows), reference.kind.at(rows), reference.path.at(rows), strict=True)
    kept = [not plan.ignored(0, module, kind, path.partition("~")[0]) for module, kind, path in spots]
    return replace(alignment, only_reference=rows[np.array(kept, bool)])


class Allowance(NamedTuple):
    """What one pair is allowed beside the rounding of its dtype, because of how the sides differ by design."""

    at_least: float
    times: float
    """Of the usual."""
    why: str


def allowances(
    reference: Side, candidate: Translated, alignment: Alignment, plan: ModelMapping
) -> dict[int, Allowance]:
    """Pairs that are allowed more than others."""
    return _variances(reference, alignment.reference, plan) | _parts(reference, candidate, alignment)


def _variances(reference: Side, rows: Ints, plan: ModelMapping) -> dict[int, Allowance]:
    """A running variance whose batches had n numbers a channel differs by at most 1 / (n - 1), once a batch has gone
    into it."""
    if not plan.tensor_matches.bessel:
        return {}
    names = zip(reference.module.at(rows), reference.kind.at(rows), reference.path.at(rows), strict=True)
    flagged = [
        pair
        for pair, (module, kind, path) in enumerate(names)
        if kind == "buffer" and full_name(module, path) in plan.tensor_matches.bessel
    ]
    inputs = np.flatnonzero(np.array([word == "input" for word in reference.kind.words], bool)[reference.kind.codes])
    numbers = dict(zip(reference.module.at(inputs), reference.elements[inputs].tolist(), strict=True))
    found = {}
    for pair in flagged:
        row = int(rows[pair])
        if reference.step[row] > reference.step.min() or reference.call[row]:
            a_channel = numbers.get(reference.module[row], 0) / max(1, int(reference.elements[row]))
            off = 1 / (a_channel - 1) if a_channel > 1 else np.inf
            found[pair] = Allowance(off, 1.0, "torch divides a variance by n - 1, paddle by n")
    return found


def _parts(reference: Side, candidate: Translated, alignment: Alignment) -> dict[int, Allowance]:
    """A part that cancels out, as the gradient of a key's bias does, is as rough as the whole that it was cut from."""
    cut = np.flatnonzero(candidate.cut[alignment.candidate])
    whole = candidate.own.l2[candidate.origin[alignment.candidate[cut]]]
    part = reference.l2[alignment.reference[cut]]
    times = np.divide(whole, part, out=np.full(len(cut), np.inf), where=part > 0)
    gradient = [kind == "param_grad" for kind in reference.kind.at(alignment.reference[cut])]
    return {
        int(pair): Allowance(0.0, max(1.0, float(much)), "rounding of the whole that it is a part of")
        for pair, much, counts in zip(cut, times, gradient, strict=True)
        if counts
    }


def explain(judgement: Judgement, allowed: Mapping[int, Allowance]) -> None:
    """Where more was allowed than usual, name the reason as the rule."""
    for pair, more in allowed.items():
        if judgement.status[pair] == "close":
            judgement.rule[pair] = more.why


def words_of(plan: ModelMapping) -> list[str]:
    """How it was mapped and what could not be, a line each."""
    report = plan.report()
    how = Counter(placed.how for placed in report.modules if placed.how != "root")
    found = [f"{times:,} by {'name' if word == 'same name' else word}" for word, times in how.most_common()]
    changed = Counter(re.sub(r" \(.*?\)", "", placed.change) for placed in report.tensors if placed.change)
    found += [f"{times:,} tensor{'s' if times > 1 else ''} {change}" for change, times in changed.most_common()]
    turned = sum(bool(placed.change) for placed in report.values)
    found += [f"{turned:,} value{'s' if turned > 1 else ''} with axes turned"] if turned else []
    lines = [f"mapped: modules {', '.join(found)}"] if found else []
    guessed = [placed for placed in report.modules if placed.how in ("structure", "elimination")]
    if guessed:
        few = ", ".join(f"{display_name(p.candidate)} → {display_name(p.reference)}" for p in guessed[:_FEW])
        lines.append(f"placed by structure: {few}{_more(len(guessed))}; result.mapping and --json have all")
    for side, ties in zip(("reference", "candidate"), plan.ties, strict=True):
        lines += [
            f"the {side} ties {first} to what the other side has apart, as {name}: its gradient is the sum of both"
            for name, first in ties.items()
        ]
    for side in ("reference", "candidate"):
        reasons: dict[str, list[str]] = {}
        for each in report.left:
            if each.side == side:
                reasons.setdefault(each.why, []).append(display_name(each.name))
        for why, names in list(reasons.items())[:_FEW]:
            lines.append(f"of the {side} not placed: {', '.join(names[:_FEW])}{_more(len(names))}: {why}")
        if len(reasons) > _FEW:
            lines.append(f"of the {side} not placed: others for {len(reasons) - _FEW} more reasons")
    if report.ignored:
        alike = Counter((each.name.rpartition(".")[2], each.why) for each in report.ignored)
        words = (f"{times} × {name} ({why})" for (name, why), times in alike.most_common(_FEW))
        lines.append(f"left out: {'; '.join(words)}")
    return lines + [f"{rule} fitted nothing" for rule in report.unused]


def _more(count: int) -> str:
    return f" and {count - _FEW:,} more" if count > _FEW else ""
