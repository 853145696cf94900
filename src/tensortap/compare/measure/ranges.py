"""Evidence of ranges and counts beside masks: extremes of pairs, and whether positions may see nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.measure.masks import MaskDifference
from tensortap.compare.measure.visible import is_padded_behind

__all__ = ["Range", "SideNorm", "may_see_nothing", "norms_between", "ranges_between"]

Range = tuple[float, float]


class SideNorm(NamedTuple):
    """The norm of a tensor, and which share of it is zero."""

    norm: float
    zeros: float


def ranges_between(reference: Side, candidate: Side, alignment: Alignment) -> Callable[[int], tuple[Range, Range]]:
    """Return a function of a pair that returns the smallest and largest element of both sides."""

    def of_pair(pair: int) -> tuple[Range, Range]:
        sides = (reference, int(alignment.reference[pair])), (candidate, int(alignment.candidate[pair]))
        ours, theirs = ((float(side.min[row]), float(side.max[row])) for side, row in sides)
        return ours, theirs

    return of_pair


def norms_between(
    reference: Side, candidate: Side, alignment: Alignment, has_positions: Callable[[tuple[int, ...]], bool]
) -> Callable[[int], tuple[SideNorm, SideNorm] | None]:
    """Return a function of a pair that returns norm and zeros of both sides; None if its shape has no positions."""

    def of_pair(pair: int) -> tuple[SideNorm, SideNorm] | None:
        if not has_positions(reference.shape(int(alignment.reference[pair]))):
            return None
        sides = (reference, int(alignment.reference[pair])), (candidate, int(alignment.candidate[pair]))
        ours, theirs = (
            SideNorm(float(side.l2[row]), float(side.zeros[row] / max(1, side.elements[row]))) for side, row in sides
        )
        return ours, theirs

    return of_pair


def may_see_nothing(
    reference: Side, candidate: Side, alignment: Alignment, masks: Mapping[int, MaskDifference]
) -> bool:
    """Whether masks in two conventions may hide everything from a position, or one may be of padding alone.

    If n tokens of a text of length l are not padding, a causal mask shows n (n + 1) / 2 elements with padding before
    them, where padding sees nothing, and n (l - n) more with padding after them. Over all texts, that is at most, or
    at least, (l + 1) / 2 for each token. A model that is given no mask has no padding, and each position sees itself.
    """
    rows = alignment.reference
    inputs = rows[reference.kind.among(("input",))[rows] & reference.module.among(("",))[rows]].tolist()
    named = [row for row in inputs if "mask" in reference.path[row]]
    if not named and any(mask.is_padded for mask in masks.values()):  # a mask by position: capture knew its name
        named = [row for row in inputs if reference.path[row].isdigit() and _is_flags(reference, row)]
    if inputs and not named:
        return False
    given = [row for row in named if len(reference.shape(row)) == 2]
    behind = is_padded_behind(reference)
    tokens = {reference.shape(row): int(np.prod(reference.shape(row)) - reference.zeros[row]) for row in given}
    for pair, mask in masks.items():
        if not mask.frees_positions or (behind and len(reference.shape(int(rows[pair]))) == 2):
            continue
        row, other = int(rows[pair]), int(alignment.candidate[pair])
        shape = reference.shape(row)
        if len(shape) != 4 or shape[2] != shape[3] or len(candidate.shape(other)) != 4:
            return True
        shown = int(reference.zeros[row])
        if reference.dtype[row] == "bool":
            shown = int(np.prod(shape)) - shown
        known = tokens.get((shape[0], shape[3]))
        if known is None or shown / shape[1] <= known * (shape[3] + 1) / 2:
            return True
    return False


def _is_flags(side: Side, row: int) -> bool:
    """Whether a record consists of the integers 0 and 1, or of booleans."""
    is_counted = side.dtype[row] == "bool" or side.dtype[row].startswith(("int", "uint"))
    return is_counted and float(side.min[row]) == 0 and float(side.max[row]) == 1
