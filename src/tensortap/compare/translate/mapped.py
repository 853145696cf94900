"""The mapping between two runs, as a comparison uses it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tensortap.compare.align.alignment import Alignment, Renames
from tensortap.compare.align.side import Side
from tensortap.compare.translate.outlines import outline_of
from tensortap.core.records import display_name
from tensortap.mapping.model_mapping import ModelMapping, map_models
from tensortap.mapping.rules import SIDES, Rules
from tensortap.store import Run

__all__ = [
    "exact_names",
    "frameworks_differ",
    "other_names",
    "plan_of",
    "reference_name",
    "without_ignored",
    "words_of",
]

_FEW = 3


def frameworks_differ(reference: Run, candidate: Run) -> bool:
    """Whether the two runs are of frameworks with different names and tensor layouts."""
    frameworks = {run.info.get("framework") for run in (reference, candidate)}
    return frameworks == set(SIDES[0])


def plan_of(
    reference: Run,
    candidate: Run,
    renames: Renames,
    rules: Rules | None,
    known: Mapping[str, str] | None = None,
) -> ModelMapping | None:
    """Map the candidate's names and tensor layouts to the reference's; None if both are the same and no rule is given.

    known: pairs of modules that their values have shown, the candidate's name first.
    """
    if rules is None and not frameworks_differ(reference, candidate):
        return None
    (made, our_values), (given, their_values) = outline_of(reference), outline_of(candidate)
    return map_models(
        made, given, rules, rename=renames if renames else None, values=(our_values, their_values), known=known
    )


def exact_names(rules: Rules) -> dict[str, str] | None:
    """Return the reference's name by the candidate's, if rules are such names and nothing else; None if not.

    Names alone need no mapping: both sides have the same tensors.
    """
    if rules.structure or not rules.modules or rules.classes or rules.tensors or rules.values or rules.ignores:
        return None
    if any(rule.regex or set(rule.names) != {"reference", "candidate"} for rule in rules.modules):
        return None
    if any("*" in name for rule in rules.modules for name in rule.names.values()):
        return None
    return {rule.names["candidate"]: rule.names["reference"] for rule in rules.modules}


def reference_name(plan: ModelMapping, module: str) -> str:
    """Return the reference's name of a candidate's module, or of the nearest container that has one."""
    if module in plan.modules:
        return plan.modules[module]
    around = next((name for name in plan.module_matches.source.above(module) if name in plan.modules), "")
    return plan.modules.get(around, module)


def other_names(plan: ModelMapping) -> dict[str, str]:
    """Return the candidate's names of the reference's modules, where they differ."""
    return {ours: display_name(theirs) for ours, theirs in plan.module_matches.source_of.items() if ours != theirs}


def without_ignored(alignment: Alignment, reference: Side, plan: ModelMapping) -> Alignment:
    """Drop records that a rule declares to have no counterpart."""
    rows = alignment.only_reference
    spots = zip(reference.module.at(rows), reference.kind.at(rows), reference.path.at(rows), strict=True)
    kept = [not plan.ignored(0, module, kind, path.partition("~")[0]) for module, kind, path in spots]
    return replace(alignment, only_reference=rows[np.array(kept, bool)])


def words_of(plan: ModelMapping) -> list[str]:
    """Return notes on what was mapped how, and what could not be."""
    report = plan.report()
    how = Counter(placed.how for placed in report.modules if placed.how != "root")
    found = [f"{times:,} by {'name' if word == 'same name' else word}" for word, times in how.most_common()]
    changed = Counter(re.sub(r" \(.*?\)", "", placed.change) for placed in report.tensors if placed.change)
    found += [f"{times:,} tensor{'s' if times > 1 else ''} {change}" for change, times in changed.most_common()]
    turned = sum(bool(placed.change) for placed in report.values)
    found += [f"{turned:,} value{'s' if turned > 1 else ''} with permuted axes"] if turned else []
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
