"""Sentences about gradients that a loop made wrong: how far they are multiples of those that they should be."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tensortap.compare.align.side import Side
from tensortap.compare.align.step_gradients import StepGradientOrigin, multiple_of, origin_of_step_gradient
from tensortap.compare.matched import Matched
from tensortap.core.causes import Cause
from tensortap.core.records import Finding

__all__ = ["describe_factor", "describe_inner_use", "describe_step_gradient"]

_SAME_FACTOR = 1e-3
"""Relative difference up to which two factors are one."""
_MOST_BESIDE = 0.1
"""Share of a difference that a factor need not explain."""


class _Got(NamedTuple):
    """The gradient that the optimizer of one side got."""

    side: str
    origin: StepGradientOrigin | None
    is_zero: bool
    norm: float
    """The norm of what the optimizer got of all parameters."""


def describe_factor(first: Finding, matched: Matched) -> str:
    """Return a further sentence if the gradient that enters the model is a multiple of the reference's."""
    if first.cause is not Cause.LOSS or first.row is None or matched.plan is not None:
        return ""
    rows = int(matched.alignment.reference[first.row]), int(matched.alignment.candidate[first.row])
    sides = matched.reference, matched.candidate
    if not all(side.has_sketch[row] for side, row in zip(sides, rows, strict=True)):
        return ""
    size = min(side.sketch_size for side in sides)
    ours, theirs = (
        side.sketches_at(np.array([row]), size)[0].astype(np.float64) for side, row in zip(sides, rows, strict=True)
    )
    factor = multiple_of(theirs, ours)
    if np.linalg.norm(theirs - factor * ours) > _MOST_BESIDE * np.linalg.norm(theirs - ours):
        return ""
    factor = float(sides[1].l2[rows[1]] / sides[0].l2[rows[0]])  # norms are more exact than sketches
    times = f" It is {factor:.5g} times the reference's"
    micros = _micro_batches(matched.candidate, rows[1])
    if micros > 1 and any(abs(factor / each - 1) < _SAME_FACTOR for each in (micros, 1 / micros)):
        return f"{times}, and the step has {micros} micro batches: check by what each loss is divided."
    return f"{times}."


def describe_inner_use(first: Finding, matched: Matched) -> str:
    """Return a further sentence if the gradient that enters the model is that of a value which its own code may use.

    A model may return what a module inside has made, and use it before it does, as a variational autoencoder its
    variances. The gradient is then the sum of both uses, and either may be wrong.
    """
    if first.cause is not Cause.LOSS or first.row is None:
        return ""
    side, row = matched.reference, int(matched.alignment.reference[first.row])
    same = (side.rank == side.rank[row]) & (side.step == side.step[row]) & (side.micro == side.micro[row])
    outputs = np.flatnonzero(same & side.kind.among(("output",)))
    path = side.path[row].partition("~")[0]
    own = [at for at in outputs.tolist() if (side.module[at], side.path[at]) == (side.module[row], path)]
    made = [at for at in outputs.tolist() if own and side.tensor_id[at] == side.tensor_id[own[0]] and side.module[at]]
    if not made:
        return ""
    name, returned = side.module[made[0]], min(int(side.seq[at]) for at in made)
    later = (at for at in outputs.tolist() if int(side.seq[at]) > returned and side.module[at])
    if all(f"{name}.".startswith(f"{side.module[at]}.") for at in later):
        return ""
    return f" It is the gradient of what {name} returns, too: the model's own code may have sent a part of it."


def describe_step_gradient(first: Finding, matched: Matched, isolated: bool = False) -> str:
    """Return a further sentence about what each side's optimizer got, as a multiple of the gradients from backward.

    isolated: the candidate's gradients are those on the reference's inputs, and may not be what its optimizer got.
    """
    if first.cause is not Cause.STEP_GRADIENT or first.row is None or matched.plan is not None:
        return ""
    alignment = matched.alignment
    ours = _got("reference", matched.reference, int(alignment.reference[first.row]))
    theirs = _got("candidate", matched.candidate, int(alignment.candidate[first.row]))
    for one, other in ((ours, theirs), (theirs, ours)):
        if one.is_zero and not other.is_zero:
            return f" What the {one.side}'s optimizer got is zero: its gradients were cleared before its step."
        if one.origin is None or (other.origin is not None and _is_made_alike(one.origin, other.origin)):
            continue
        if one.origin.since < first.key.step:
            steps = f"steps {one.origin.since} to {first.key.step}"
            return f" The {one.side}'s gradients were not cleared: what its optimizer got sums those of {steps}."
        if one.origin.is_last_micro:
            return f" What the {one.side}'s optimizer got is the gradient of its last micro batch alone."
    known = [got.origin is not None for got in (ours, theirs)]
    if not (all(known) if isolated else any(known)):
        return ""
    return f" {_in_words(ours)}; {_in_words(theirs)[0].lower()}{_in_words(theirs)[1:]}."


def _is_made_alike(one: StepGradientOrigin, other: StepGradientOrigin) -> bool:
    return (one.since, one.is_last_micro) == (other.since, other.is_last_micro)


def _got(name: str, side: Side, row: int) -> _Got:
    same = side.kind.among(("step_grad",)) & (side.rank == side.rank[row]) & (side.step == side.step[row])
    norms = np.asarray(side.l2[np.flatnonzero(same)], np.float64)
    return _Got(name, origin_of_step_gradient(side, row), not side.l2[row], float(np.sqrt(np.sum(norms**2))))


def _in_words(got: _Got) -> str:
    norm = f"with a norm of {got.norm:.4g} over all parameters"
    if got.origin is None:
        return f"The {got.side}'s is no multiple of the gradient from backward, {norm}"
    micros = got.origin.micros
    made = f"the sum over its {micros} micro batches" if micros > 1 else "the gradient from backward"
    times = "" if abs(got.origin.factor - 1) < _SAME_FACTOR else f"{got.origin.factor:.4g} times "
    return f"The {got.side}'s is {times}{made}, {norm}"


def _micro_batches(side: Side, row: int) -> int:
    """Return how many micro batches the step of a row has."""
    same = (side.step == side.step[row]) & (side.rank == side.rank[row]) & side.phase.among(("backward",))
    return len(np.unique(side.micro[same]))
