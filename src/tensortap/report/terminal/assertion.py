"""A divergence as an assertion message: mismatched elements, the greatest difference with its index, the tolerance.
The form follows `torch.testing.assert_close`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tensortap.core.records import Comparison, Key
from tensortap.report import pairs, unmatched
from tensortap.report.findings import first_row, inputs_in_words
from tensortap.report.wording import apart, born_in, clean, command_line, count, number, percent, plural, rough

__all__ = ["describe_pair", "message"]

Row = Mapping[str, Any]
_HEADLINES = {
    "diverged": "The runs do not match!",
    "imprecise": "The runs match within tolerance, but the candidate is less exact!",
}


def message(comparison: Comparison, options: Sequence[str] | None = ()) -> str:
    """Explain why two runs do not match, and name the command that shows more.

    `options` belong to the command; None if no command can show it, as with runs in memory.
    """
    lines = [_HEADLINES.get(comparison.verdict, "The runs cannot be compared!")]
    lines += ["", clean(comparison.sentence)]
    if (first := first_row(comparison)) is not None:
        what = "First divergence" if comparison.verdict == "diverged" else "First place"
        lines += ["", f"{what}: {_name(first)}", *describe_pair(first)]
    if comparison.first is not None:
        lines.append(f"Its inputs: {inputs_in_words(comparison.first)}")
    bad = sum(comparison.counts.get(status, 0) for status in pairs.WRONG_STATUSES)
    lines += ["", f"Pairs that failed: {_of(bad, len(comparison))}"]
    lines += [f"  {unmatched.words(group)}" for group in unmatched.groups(comparison)[:4]]
    lines += [f"Allowed: {clean(comparison.policy)}", *(f"Note: {clean(note)}" for note in comparison.notes)]
    if options is None:
        return "\n".join(lines)
    command = ["tensortap", "compare", comparison.reference, comparison.candidate, *options, "-v"]
    return "\n".join([*lines, "", f"To see more: {command_line(command)}"])


def describe_pair(row: Row) -> list[str]:
    """Describe one pair, one fact per line."""
    lines = []
    status, mismatched = row["status"], pairs.value(row, "mismatched")
    elements = row.get("elements")
    if elements is None and row.get("shape_reference") is not None:
        elements = math.prod(row["shape_reference"])
    if status in ("shape", "nonfinite"):
        lines.append(f"{'Shapes' if status == 'shape' else 'Not finite'}: {pairs.detail(row)}")
    elif row.get("container") is not None:
        lines.append(f"Born {born_in(row['cause'], row['container'])}")
    if not math.isnan(mismatched) and elements:
        lines.append(f"Mismatched elements: {_of(round(mismatched * elements), elements)}")
    if not math.isnan(pairs.value(row, "max_abs")) and status != "nonfinite":
        lines.append(f"Greatest absolute difference: {_greatest(row)}")
    if not math.isnan(pairs.value(row, "rel_l2")) and status != "nonfinite":
        allowed = rough(pairs.value(row, "tolerance"))
        rule = f": {clean(row['rule'])}" if row.get("rule") else ""
        lines.append(f"Relative error: {pairs.error(row)} (up to {allowed} allowed{rule})")
    if status == "diverged" and (worst := pairs.worst_row(row)):
        allowed = rough(pairs.value(row, "row_tolerance"))
        lines.append(f"Worst row: {worst} at index {tuple(row['row_index'])} (up to {allowed} allowed)")
    return lines


def _greatest(row: Row) -> str:
    index = row.get("max_abs_index")
    text = number(pairs.value(row, "max_abs"))
    if index is not None:
        text += f" at index {tuple(index)}"
    candidate, reference = (pairs.value(row, f"{side}_value") for side in ("candidate", "reference"))
    if math.isnan(candidate) or math.isnan(reference):
        return text
    return "{} ({} instead of {})".format(text, *apart(candidate, reference))


def _name(row: Row) -> str:
    key = Key(*(row[name] for name in Key._fields))
    return f"{clean(key)} · rank {row['rank']}"


def _of(part: int, whole: int) -> str:
    return f"{count(part)} / {count(whole)} ({percent(part / whole)})" if whole else plural(part, "pair")
