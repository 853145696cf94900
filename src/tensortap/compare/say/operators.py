"""Sentences and notes about operators below the modules."""

from __future__ import annotations

from collections.abc import Sequence

from tensortap.compare.matched import Matched
from tensortap.core.operator_paths import parse_operator
from tensortap.core.records import Finding

__all__ = ["describe_operator", "operator_notes"]

_FEW = 3


def describe_operator(first: Finding) -> str:
    """Return a further sentence that names the operator and its line; empty if it is not known."""
    place = first.operator
    if place is None:
        return ""
    inside = "In its backward" if first.key.phase == "backward" else "Inside it"
    alone = _alone(place.missing, place.added)
    if first.status == "missing":
        return f" In its backward, the candidate computes no gradient at {_listed(place.missing)}."
    if not place.reference:
        return f" {inside}, {alone}."
    theirs, ours = parse_operator(place.reference), parse_operator(place.candidate)
    other = f" ({ours.in_words if ours.name != theirs.name else ours.place} in the candidate)"
    other = "" if (ours.name, ours.place) == (theirs.name, theirs.place) else other
    off = f", off by {place.rel_l2:.2g}" if place.rel_l2 == place.rel_l2 else ""
    before = f"; before it, {alone}" if alone else ""
    return f" {inside}, the first operator that differs is {theirs.in_words}{other}{off}{before}."


def operator_notes(matched: Matched) -> list[str]:
    """Return notes on operators that were not compared."""
    sides = ("reference", matched.reference, "candidate"), ("candidate", matched.candidate, "reference")
    notes = [
        f"the {name} has records of operators, which were not compared: {_why_apart(matched, other)}"
        for name, side, other in sides
        if side.without_operators
    ]
    for (name, _, other), count in zip(sides, matched.operators.uncompared, strict=True):
        if count:
            notes.append(f"{count:,} records of operators of the {name} are of calls that the {other} recorded none of")
    return notes


def _why_apart(matched: Matched, other: str) -> str:
    if matched.plan is not None:
        return "the sides have other names"
    side = matched.reference if other == "reference" else matched.candidate
    return "the ranks were joined" if side.without_operators else f"the {other} has none"


def _alone(missing: Sequence[str], added: Sequence[str]) -> str:
    parts = []
    if missing:
        parts.append(f"the candidate lacks {_listed(missing)}")
    if added:
        parts.append(f"{'' if missing else 'the candidate '}adds {_listed(added)}")
    return " and ".join(parts)


def _listed(paths: Sequence[str]) -> str:
    words = [parse_operator(path).in_words for path in paths[:_FEW]]
    more = f" and {len(paths) - _FEW} more" if len(paths) > _FEW else ""
    return ", ".join(words) + more
