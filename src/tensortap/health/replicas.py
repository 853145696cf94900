"""Checks of ranks against each other: replicas of one run that differ, and parts that do not make up a whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tensortap.compare.align.side import Side
from tensortap.compare.join.findings import Disagreement, disagreements, layout_finding
from tensortap.compare.join.joining import Joining
from tensortap.compare.join.source import JoinedSource
from tensortap.compare.say.divergence import layout_slots
from tensortap.core.causes import CAUSES
from tensortap.core.records import Finding, HealthFinding

__all__ = ["LAYOUT", "REPLICA", "find_layout_problems"]

REPLICA = "replica"
LAYOUT = "layout"
_SUMMED = ("param_grad", "grad_input", "grad_output")
"""Kinds of gradients that a layout may still have to add up."""


def find_layout_problems(side: Side) -> tuple[list[HealthFinding], list[str]]:
    """Return findings about the ranks of a run, and notes."""
    if len(side.run.ranks) < 2 or not len(side):
        return [], []
    joined = JoinedSource(side.run)
    found, rounding, summands = [], [], []
    for each in disagreements(joined):
        row = _row(side, joined, each)
        if row is None:
            continue
        if each.is_rounding:
            rounding.append(each)
        elif each.finding.key.kind in _SUMMED and joined.layout.plan_of(each.group).guessed:
            summands.append(each)
        else:
            text = _in_words(each.finding)
            found.append(HealthFinding(row, each.finding.key, each.finding.rank, side.cls[row], REPLICA, text))
    notes = []
    if rounding:
        notes.append(f"replicas of {len(rounding):,} values differ by rounding, as {rounding[0].finding.key}")
    if summands:
        notes.append(
            f"{len(summands):,} gradients differ between ranks that were only guessed to hold the same, as "
            f"{summands[0].finding.key}: they may be summands; step_grad and parameters show whether they were added"
        )
    return [*found, *_contradictions(side, joined)], notes


def _row(side: Side, joined: JoinedSource, each: Disagreement) -> int | None:
    """Return the side's row of the odd rank; None if it was not selected."""
    pieces, fact = joined.layout.pieces, each.finding.layout
    assert fact is not None
    members = joined.layout.members(each.group)
    odd = members[pieces.rank[members] == fact.ranks[0]][0]
    rows = np.flatnonzero((side.rank == pieces.rank[odd]) & (side.row == pieces.row[odd]))
    return int(rows[0]) if len(rows) else None


def _contradictions(side: Side, joined: JoinedSource) -> Iterator[HealthFinding]:
    """Yield the first record of each tensor whose parts do not cover it, although all ranks were recorded."""
    seen: set[tuple[str, str, str]] = set()
    for each in Joining({"": joined}).unjoined():
        spot = (each.key.module, each.key.kind, each.key.path)
        if not each.recorded or each.plan.unknown or each.plan.lacking or spot in seen:
            continue
        seen.add(spot)
        same = (side.rank == each.ranks[0]) & (side.step == each.key.step) & side.module.among((each.key.module,))
        rows = [row for row in np.flatnonzero(same).tolist() if side.key(row) == each.key]
        if rows:
            text = _in_words(layout_finding(each))
            yield HealthFinding(rows[0], each.key, each.ranks[0], side.cls[rows[0]], LAYOUT, text)


def _in_words(finding: Finding) -> str:
    return CAUSES[finding.cause].sentence.format(step=finding.key.step, **layout_slots(finding)).rstrip(".")
