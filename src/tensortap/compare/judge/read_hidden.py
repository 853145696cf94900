"""Losses that read positions that a mask hides: two kinds of attention differ there, and then train differently.

A causal language model predicts the first token of a text from the position before it. If padding is in front of the
text, that position sees nothing, and each implementation of attention returns something else. If the loss reads it, all
gradients differ, and no code is wrong: from there on, nothing can be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.causes import is_within
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.structure import Structure
from tensortap.compare.judge.unread import UnreadDifferences
from tensortap.compare.measure.hidden import EXTREMES_AGREE, FOLLOWS_HIDDEN, UNREAD_POSITIONS
from tensortap.core.causes import Cause
from tensortap.core.records import GRADIENT_KINDS, WRONG_STATUSES, Finding
from tensortap.kernels.summary.visible import Positions, along

__all__ = ["READ_HIDDEN", "find_read_hidden", "find_read_in_isolation"]

Array = npt.NDArray[Any]

READ_HIDDEN = "the loss reads positions that a mask hides"
_MOST_ALONG = 0.5
"""Share of a difference that may be one of norms: gradients at other positions are about as large on both sides."""


def find_read_hidden(
    judgement: Judgement,
    pairs: Pairs,
    structure: Structure,
    births: Sequence[Finding],
    gradient_of: Callable[[int], Array | None],
    may_see_nothing: Callable[[], bool] = lambda: False,
) -> UnreadDifferences:
    """Return the wrong rows from the first backward on, if its loss reads positions at which two kinds of attention
    differ; none if something is wrong in the forward before.

    The gradient that the loss sends back shows it. Whole tensors show that it differs at these positions alone, or that
    it is right and not zero there, however little the loss itself differs. A scalar that the model returns beside its
    other outputs, and that the loss adds, may be made from these positions as well, as the balance of experts is.

    gradient_of: returns the reference's tensor of a row; None if it was not kept.
    may_see_nothing: whether masks may hide everything from a position, as far as their summaries show.
    """
    rows = [birth.row for birth in births if birth.row is not None]
    if pairs.isolated is not None or not rows:
        return UnreadDifferences()
    first = min(rows, key=lambda row: (structure.scope[row][1], structure.seq[row]))
    scope = structure.scope[first]
    if structure.kind[first] in ("input", "output"):
        return UnreadDifferences()
    outputs, gradients = (
        [row for row, here in enumerate(structure.scope) if here == scope and _is_of_root(row, kind, structure)]
        for kind in ("output", "grad_output")
    )
    losses = [row for row in outputs if not pairs.dimensions[row]]  # one that reads them has another value, too
    differs = any(_is_hidden(row, judgement, pairs) for row in losses or outputs)
    read = any(
        _is_hidden(row, judgement, pairs) or judgement.status[row] in WRONG_STATUSES
        for row in gradients
        if pairs.dimensions[row] > 0 and (row in pairs.limits if row in pairs.shown else not _is_scaled(row, pairs))
    )
    right = [row for row in gradients if judgement.status[row] not in WRONG_STATUSES]
    masks = [mask for row, mask in pairs.masks.items() if mask.frees_positions and structure.scope[row] == scope]
    certain = any(_is_hidden(row, judgement, pairs) for row in outputs) and any(
        mask.positions is not None and (given := gradient_of(row)) is not None and _is_at(mask.positions, given)
        for row in right
        for mask in masks[:1]
    )
    scalars = {structure.path[row] for row in losses if _is_hidden(row, judgement, pairs)}
    # If a gradient of another output is wrong, the scalar is the loss of that output, and may be wrong itself.
    adds = right == gradients and any(not pairs.dimensions[row] and structure.path[row] in scalars for row in right)
    # What enters the model, the loss sends: no attention made it.
    blamed = {birth.module for birth in births if birth.row == first and birth.cause is not Cause.LOSS}
    sent = any(_is_sent_to_hidden(module, first, pairs, structure, gradient_of) for module in blamed)
    spreads = "grad_output" in structure.kinds_in_step[scope[:2]] or _spreads(first, judgement, structure)
    sent = sent or any(spreads and _may_be_sent(module, first, pairs, structure, may_see_nothing) for module in blamed)
    if not (certain or adds or sent or (differs and read)):
        return UnreadDifferences()
    steps = np.array([each[1] for each in structure.scope])
    wrong = np.flatnonzero(judgement.having(*WRONG_STATUSES) & (steps >= scope[1])).tolist()
    return UnreadDifferences(frozenset([*wrong, *rows]), READ_HIDDEN)


def find_read_in_isolation(
    judgement: Judgement,
    pairs: Pairs,
    structure: Structure,
    births: Sequence[Finding],
    gradient_of: Callable[[int], Array | None],
) -> UnreadDifferences:
    """Return the wrong gradients of attention that was given one at positions that its mask hides, in a check.

    There, each kind of attention sends back something else. Other modules are judged as usual.

    gradient_of: returns the reference's tensor of a row; None if it was not kept.
    """
    excused = {
        birth.module
        for birth in births
        if birth.row is not None and _is_sent_to_hidden(birth.module, birth.row, pairs, structure, gradient_of)
    }
    wrong = judgement.having(*WRONG_STATUSES)
    rows = {birth.row for birth in births if birth.module in excused and birth.row is not None}
    rows |= {
        row
        for row in np.flatnonzero(wrong).tolist()
        if structure.kind[row] in GRADIENT_KINDS
        and any(structure.module[row] == module or is_within(structure.module[row], module) for module in excused)
    }
    return UnreadDifferences(frozenset(rows), READ_HIDDEN)


def _is_sent_to_hidden(
    module: str, row: int, pairs: Pairs, structure: Structure, gradient_of: Callable[[int], Array | None]
) -> bool:
    """Whether a row is a gradient of a module that is given a mask, and a gradient at positions that this hides."""
    if structure.kind[row] not in GRADIENT_KINDS:
        return False
    masks = [
        mask.positions
        for each, mask in pairs.masks.items()
        if structure.module[each] == module and mask.frees_positions and mask.positions is not None
    ]
    calls = structure.calls_of_module.get((structure.scope[row], module), ()) if masks else ()
    given = [gradient_of(each) for call in calls for each in call.of("grad_output")]
    return any(each is not None and _is_at(masks[-1], each) for each in given)


def _may_be_sent(
    module: str, row: int, pairs: Pairs, structure: Structure, may_see_nothing: Callable[[], bool]
) -> bool:
    """Whether a row is a gradient that attention made under a mask, and no record shows at which positions.

    The forward of two kinds of attention may agree where a mask hides everything: both return the mean of all values,
    and each sends back something else. If it is the very same code, its forward agrees to the last bit.
    """
    scope, kind = structure.scope[row], structure.kind[row]
    if kind not in GRADIENT_KINDS or (kind == "grad_output" and structure.module[row] == module):
        return False  # what comes to the module's own output is made by what comes after it
    recorded = "grad_output" in structure.kinds_in_step[scope[:2]]
    around = [module]
    if not recorded and kind == "param_grad" and module:
        around.append(module.rpartition(".")[0])  # its code made the gradient at the output
    masks = {structure.module[each]: mask for each, mask in pairs.masks.items() if structure.scope[each] == scope}
    masked = [
        name
        for name in around
        if name in masks and masks[name].frees_positions and (masks[name].positions is None or not recorded)
    ]
    calls = [call for name in masked for call in structure.calls_of_module.get((scope, name), ())]
    inside = [each for call in calls for each in (call, *call.children)]
    if all(pairs.equal[each] for call in inside for each in call.of("input", "output")):
        return False
    return any(masks[name].positions is not None for name in masked) or may_see_nothing()


def _spreads(first: int, judgement: Judgement, structure: Structure) -> bool:
    """Whether most gradients of parameters from a row on are wrong: what attention sends back reaches all of them."""
    scope = structure.scope[first]
    later = range(first, len(structure.kind))
    rows = [row for row in later if structure.kind[row] == "param_grad" and structure.scope[row] == scope]
    wrong = sum(judgement.status[row] in WRONG_STATUSES for row in rows)
    return 2 * wrong > len(rows)


def _is_at(positions: Positions, gradient: Array) -> bool:
    """Whether a gradient is not zero at some of these positions."""
    where = along(positions, gradient.shape)
    return where is not None and bool(np.any(np.where(where, gradient.astype(np.float64), 0.0)))


def _is_scaled(row: int, pairs: Pairs) -> bool:
    """Whether one side is about a multiple of the other: then its positions do not differ from each other."""
    return abs(float(pairs.l2[row] - pairs.candidate_l2[row])) > _MOST_ALONG * float(pairs.distance[row])


def _is_of_root(row: int, kind: str, structure: Structure) -> bool:
    return structure.kind[row] == kind and not structure.module[row]


def _is_hidden(row: int, judgement: Judgement, pairs: Pairs) -> bool:
    """Whether a row differs as far as is known at positions that a mask hides, or follows from these."""
    limit = pairs.limits.get(row)
    return limit in (UNREAD_POSITIONS, EXTREMES_AGREE) or judgement.rule[row] == FOLLOWS_HIDDEN
