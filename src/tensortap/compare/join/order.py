"""The same numbers in another order: parts on the wrong ranks, other interleaving, or another order of a sequence.

With the bytes of both sides, the slices along the sharded dimension are matched by random projections, and the
permutation says which it is. Without them, the axis and the name decide between the words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensortap.compare.join.source import JoinedSource
from tensortap.compare.matched import Matched
from tensortap.compare.say.formatting import listed
from tensortap.core.causes import Cause

__all__ = ["Reordering", "find_reordering", "matched_slices", "permuted_ranks"]

Ints = npt.NDArray[np.int64]
_LARGEST = 1 << 26
"""Elements beyond which a tensor is not read as a whole only to word its cause."""
_SEQUENCE = ("cp", "context", "sp", "seq", "ulysses", "ring")
_FUSED = re.compile(r"qkv|kv|gate_?up|w13|fc1|in_proj|c_attn|query_key_value|h_to_4h|linear_fc1|wqkv|glu", re.I)


@dataclass(frozen=True)
class Reordering:
    """Why the numbers of a tensor are in another order."""

    cause: Cause
    words: str


def find_reordering(
    matched: Matched, joined: JoinedSource, pair: int, group: int, axis: str, dimension: int
) -> Reordering | None:
    """Explain a tensor that has the reference's numbers in another order along an axis."""
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    one, other = int(alignment.reference[pair]), int(alignment.candidate[pair])
    held = _held(joined, group, axis, dimension)
    name = f"{left.module[one]}.{left.path[one]}"
    sequence = axis.lower().startswith(_SEQUENCE)
    if not (left.kept[one] and right.kept[other]) or int(left.elements[one]) > _LARGEST:
        if sequence:
            return Reordering(Cause.SEQUENCE_ORDER, "the numbers are the reference's, at other positions")
        if _FUSED.search(name):
            return Reordering(Cause.INTERLEAVING, "the parts that are fused in it may be interleaved in another way")
        return Reordering(Cause.SWAPPED_RANKS, "the numbers are the reference's, at other positions")
    found = matched_slices(left.array(one), right.array(other), dimension)
    if found is None:
        return None
    ranks = permuted_ranks(found, held)
    if ranks is not None:
        shown = ", ".join(f"{axis} {at} holds the part of {axis} {to}" for at, to in list(ranks.items())[:2])
        more = f" and {len(ranks) - 2} more are swapped" if len(ranks) > 2 else ""
        return Reordering(Cause.SWAPPED_RANKS, f"{shown}{more}{_rotated(ranks, len(held))}")
    at = int(np.flatnonzero(found != np.arange(len(found)))[0])
    words = f"index {at} of dimension {dimension} holds what the reference has at {int(found[at])}"
    if sequence:
        return Reordering(Cause.SEQUENCE_ORDER, words)
    return Reordering(Cause.INTERLEAVING, words)


def matched_slices(
    reference: npt.NDArray[np.generic], candidate: npt.NDArray[np.generic], dimension: int
) -> Ints | None:
    """Return for each slice of the candidate along a dimension which slice of the reference it is; None if they are not
    the same slices in another order."""
    if reference.shape != candidate.shape or not reference.size:
        return None
    ours, theirs = (_projected(array, dimension) for array in (reference, candidate))
    order = np.argsort(ours[:, 0], kind="stable")
    other = np.argsort(theirs[:, 0], kind="stable")
    close = np.allclose(ours[order], theirs[other], rtol=1e-4, atol=1e-6 * float(np.abs(ours).max() or 1.0))
    if not close:
        return None
    found = np.empty(len(order), np.int64)
    found[other] = order
    # Slices with equal numbers may stand for each other: those that are in place stay there.
    same = np.isclose(ours, theirs, rtol=1e-4).all(axis=1)
    return None if same.all() else found


def _projected(array: npt.NDArray[np.generic], dimension: int) -> npt.NDArray[np.float64]:
    rows = np.moveaxis(array, dimension, 0).reshape(array.shape[dimension], -1).astype(np.float64)
    directions = np.random.default_rng(0).normal(0, 1, (rows.shape[1], 2))
    projected: npt.NDArray[np.float64] = np.nan_to_num(rows) @ directions
    return projected


def permuted_ranks(found: Ints, held: dict[int, Ints]) -> dict[int, int] | None:
    """Return which position of the axis each other position's part is at; None if parts are not moved as wholes.

    >>> permuted_ranks(np.array([2, 3, 0, 1]), {0: np.array([0, 1]), 1: np.array([2, 3])})
    {0: 1, 1: 0}
    """
    by_part = {tuple(part.tolist()): position for position, part in held.items()}
    moved: dict[int, int] = {}
    for position, part in held.items():
        source = by_part.get(tuple(found[part].tolist()))
        if source is None:
            return None
        if source != position:
            moved[position] = source
    return moved or None


def _held(joined: JoinedSource, group: int, axis: str, dimension: int) -> dict[int, Ints]:
    """Return the indices along a dimension that each position of an axis holds."""
    layout = joined.layout
    pieces = layout.pieces
    found: dict[int, Ints] = {}
    for row in layout.members(group).tolist():
        position = pieces.coordinate(int(pieces.rank[row]), axis)
        number = int(pieces.placement[row])
        if number < 0 or position in found:
            continue
        spans = sorted(
            {(box[dimension][0], box[dimension][1], box[dimension][2]) for box in pieces.placements[number].boxes}
        )
        found[position] = np.concatenate([np.arange(offset, offset + length) for _, offset, length in spans])
    return found


def _rotated(moved: dict[int, int], count: int) -> str:
    shifts = {(to - at) % count for at, to in moved.items()}
    if len(moved) == count and len(shifts) == 1 and count > 2:
        return f": they are rotated by {listed(sorted(shifts))}"
    return ""
