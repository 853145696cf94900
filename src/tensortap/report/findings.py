"""Findings as plain objects, with the names of the table's columns."""

from __future__ import annotations

from typing import Any

from tensortap.core.arguments import as_json
from tensortap.core.records import Comparison, Finding, LayoutFact, TruthErrors, display_name
from tensortap.report import pairs
from tensortap.report.wording import clean, plural

__all__ = ["finding_object", "first_row", "inputs_in_words"]

_NUMBERS = ("rel_l2", "rel_l2_bar", "cosine", "l2", "max_abs", "max_abs_index", "reference_value", "candidate_value")
_MEASURED = ("elements", "equal", "exact", *_NUMBERS, "max_ulp", "mismatched", "row_rel_l2", "row_index")


def finding_object(finding: Finding) -> dict[str, Any]:
    """Return all fields of a finding; None where nothing was measured.

    `module` is the module of the record, as in the table; `container`, if not None, is the module at fault.
    """
    difference = finding.difference
    measured: dict[str, Any] = {name: None if difference is None else getattr(difference, name) for name in _MEASURED}
    for name in ("max_abs_index", "row_index"):
        measured[name] = None if measured[name] is None else list(measured[name])
    return {
        **finding.key._asdict(),
        "rank": finding.rank,
        "cls": finding.cls,
        "container": finding.container,
        "counterpart": finding.counterpart,
        "status": finding.status,
        "cause": finding.cause.value,
        "inputs_matched": finding.inputs_matched,
        "inputs_rel_l2": finding.inputs_rel_l2,
        "unjudged": [key._asdict() for key in finding.unjudged],
        "tolerance": finding.tolerance,
        "row_tolerance": finding.row_tolerance,
        "rule": finding.rule,
        "arguments": [
            {"path": path, "reference": as_json(ours), "candidate": as_json(theirs)}
            for path, ours, theirs in finding.arguments
        ],
        "truth": None if finding.truth is None else _truth_object(finding.truth),
        "layout": None if finding.layout is None else _layout_object(finding.layout),
        "operator": None if finding.operator is None else finding.operator.as_dict(),
        **measured,
    }


def _truth_object(truth: TruthErrors) -> dict[str, Any]:
    return {
        "of": truth.of,
        "reference": truth.reference,
        "candidate": truth.candidate,
        "roundings": truth.roundings,
        "exact": truth.exact,
    }


def _layout_object(fact: LayoutFact) -> dict[str, Any]:
    return {"axis": fact.axis, "ranks": list(fact.ranks), "count": fact.count, "residual": fact.residual}


def first_row(comparison: Comparison) -> dict[str, Any] | None:
    """Return the first divergence as a row of the table, with the fields of the finding."""
    if comparison.first is None:
        return None
    at = comparison.first.row
    row = pairs.row_at(comparison, at) if at is not None else {}
    return {**finding_object(comparison.first), **row}


def inputs_in_words(finding: Finding) -> str:
    """Describe whether the sources of a finding are right. Sources without judgement are named, not called a match."""
    said = {True: "matched", False: "differed already", None: "were not recorded"}[finding.inputs_matched]
    if not finding.unjudged:
        return said
    first, *rest = finding.unjudged
    of = f" of {display_name(first.module)}" if first.module != finding.key.module else ""
    named = clean(f"{first.kind} {first.path}{of}") + (f" and {plural(len(rest), 'other')}" if rest else "")
    if finding.inputs_matched is None:
        return f"could not be judged ({named})"
    return f"{said}, except {named}, which could not be judged"
