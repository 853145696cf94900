"""Sentences about parameters that something but the optimizer changed: a module is named for what the loop did."""

from __future__ import annotations

import numpy as np

from tensortap.compare.align.side import Side
from tensortap.compare.matched import Matched
from tensortap.compare.say.formatting import rounded
from tensortap.core.causes import Cause
from tensortap.core.records import Finding
from tensortap.mapping.outline import full_name

__all__ = ["describe_changed_parameters"]

_FURTHER = 8.0
"""Times that a parameter moved as far as the reference's in a step, from which on its gradient does not explain it."""
_SHARE = 1 / 8
"""Share of a module's own error by which its parameter must be off to explain it."""


def describe_changed_parameters(first: Finding, matched: Matched) -> str:
    """Return a further sentence if a parameter of the module that is named was changed between two steps.

    Capture records parameters after each step of the optimizer. Those of the module matched after the step before, and
    differ after this one by more than an update: a moving average, a checkpoint or an initialisation changed them.
    """
    if first.cause is not Cause.OUTPUT or first.row is None or not first.key.step or matched.plan is not None:
        return ""
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    ours = left.kind.among(("param",)) & (left.call > 0) & (left.rank == first.rank)
    ours &= left.module.among((first.module,))
    pairs = np.flatnonzero(ours[alignment.reference])
    steps = left.step[alignment.reference[pairs]]
    before = {left.path[int(alignment.reference[pair])]: int(pair) for pair in pairs[steps == first.key.step - 1]}
    for pair in pairs[steps == first.key.step].tolist():
        path, off = left.path[int(alignment.reference[pair])], float(matched.measures.rel_l2[pair])
        if path not in before or not off > _SHARE * first.rel_l2:
            continue
        name = full_name(first.module, path)
        if not (_is_held(left, first, name) or _is_held(right, first, name)):
            return (
                f" No optimizer holds its {path}, which is off by {rounded(off)} after the step: check the code that "
                "changes it, such as a moving average."
            )
        rows = alignment.reference[[before[path], pair]], alignment.candidate[[before[path], pair]]
        moved = [_moved(side, own) for side, own in zip((left, right), rows, strict=True)]
        if min(moved) >= 0 and max(moved) > _FURTHER * min(moved):
            side, other = ("candidate", "reference") if moved[1] > moved[0] else ("reference", "candidate")
            times = f"{max(moved) / min(moved):.2g} times as far as" if min(moved) else "and not at all in"
            return (
                f" The {side}'s {path} moved {times} the {other}'s since the step before: something but the optimizer "
                "may have changed it."
            )
    return ""


def _is_held(side: Side, first: Finding, parameter: str) -> bool:
    """Whether an optimizer holds a parameter, as far as is known."""
    facts = side.run.loop(first.rank)
    values = [facts.value("parameters", first.key.step, of) or {} for of in facts.subjects("parameters")]
    return not values or any(parameter in (value.get("names") or ()) for value in values)


def _moved(side: Side, rows: np.ndarray) -> float:
    """Return how far apart two records are; -1 if it is not known."""
    if not side.has_sketch[rows].all():
        return -1.0
    one, other = side.sketches_at(rows).astype(np.float64)
    return float(np.linalg.norm(one - other))
