"""Pairs of records that are masks, or may be, by their summaries."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Bools, Side
from tensortap.compare.measure.mask_conventions import FLAGS, NONE, NUMBER, OPEN, are_floats, conventions
from tensortap.compare.measure.masks import MaskDifference, is_broadcast, is_padding

__all__ = ["boolean_pairs", "equal_flags", "equal_masks", "mask_pairs", "padding_masks", "reshaped_mask_pairs"]

_FORWARD = ("input", "output")


def mask_pairs(reference: Side, candidate: Side, alignment: Alignment, open_pairs: npt.NDArray[np.int64]) -> list[int]:
    """Return the pairs that are masks on both sides. Numbers 0 and 1 on both sides are compared as numbers."""
    if not len(open_pairs):
        return []
    rows, partners = alignment.reference[open_pairs], alignment.candidate[open_pairs]
    left, right = conventions(reference)[rows], conventions(candidate)[partners]
    hiding = (left > OPEN) | (right > OPEN)
    masks = (left > NONE) & (right > NONE) & hiding & ~((left == FLAGS) & (right == FLAGS))
    # Ones against zeros of one kind of dtype are numbers, not two ways to hide nothing.
    real = [are_floats(side)[side.dtype.codes[which]] for side, which in ((reference, rows), (candidate, partners))]
    masks &= ~((left + right == OPEN + FLAGS) & (real[0] == real[1]))
    masks &= reference.kind.among(_FORWARD)[rows] & ~candidate.reordered[partners]
    found: list[int] = open_pairs[masks].tolist()
    return found


def reshaped_mask_pairs(
    reference: Side, candidate: Side, alignment: Alignment, pairs: npt.NDArray[np.int64]
) -> list[int]:
    """Return those of these pairs, of two shapes each, that `reshaped_mask_difference` can compare."""
    rows, partners = alignment.reference[pairs], alignment.candidate[pairs]
    inputs = reference.kind.among(("input",))[rows] if len(pairs) else np.empty(0, bool)
    if not inputs.any():
        return []
    left, right = conventions(reference), conventions(candidate)
    found = []
    for pair, ours, theirs in zip(*(each[inputs].tolist() for each in (pairs, rows, partners)), strict=True):
        masks = reference.shape(ours), int(left[ours]), candidate.shape(theirs), int(right[theirs])
        if is_padding(*masks) or is_broadcast(*masks):
            found.append(pair)
    return found


def boolean_pairs(
    reference: Side, candidate: Side, alignment: Alignment, distance: npt.NDArray[np.float64]
) -> dict[int, MaskDifference]:
    """Return the pairs of 0 and 1 that are boolean on a side and differ: as many elements as their squared distance."""
    rows, partners = alignment.reference, alignment.candidate
    if not len(rows) or "bool" not in (*reference.dtype.words, *candidate.dtype.words):
        return {}
    flags = (conventions(reference)[rows] == FLAGS) & (conventions(candidate)[partners] == FLAGS)
    flags &= reference.dtype.among(("bool",))[rows] | candidate.dtype.among(("bool",))[partners]
    pairs = np.flatnonzero(flags & reference.kind.among(_FORWARD)[rows] & (distance > 0))
    found = {}
    for pair in pairs.tolist():
        elements, zeros = int(reference.elements[rows[pair]]), int(reference.zeros[rows[pair]])
        differing, words = float(distance[pair]) ** 2, ("boolean", "boolean")
        found[pair] = MaskDifference(differing, elements, elements - zeros, False, words=words)
    return found


def equal_masks(reference: Side, candidate: Side, alignment: Alignment, equal: Bools) -> list[int]:
    """Return the pairs of inputs that are equal, and that hide elements by batch, query and key."""
    pairs = np.flatnonzero(equal)
    if not len(pairs):
        return []
    rows = alignment.reference[pairs]
    kinds = conventions(reference)[rows]
    masks = (kinds >= NUMBER) | ((kinds == FLAGS) & reference.dtype.among(("bool",))[rows])
    masks &= reference.kind.among(("input",))[rows] & (reference.zeros[rows] < reference.elements[rows])
    masks &= (reference.zeros[rows] > 0) & ~candidate.reordered[alignment.candidate[pairs]]
    return [pair for pair in pairs[masks].tolist() if len(reference.shape(int(alignment.reference[pair]))) > 2]


def equal_flags(reference: Side, candidate: Side, alignment: Alignment, equal: Bools) -> list[int]:
    """Return the pairs of inputs that are equal, and that consist of 0 and 1, one for each text and token."""
    pairs = np.flatnonzero(equal)
    if not len(pairs):
        return []
    rows = alignment.reference[pairs]
    flags = (conventions(reference)[rows] == FLAGS) & reference.kind.among(("input",))[rows]
    flags &= (reference.zeros[rows] > 0) & (reference.zeros[rows] < reference.elements[rows])
    flags &= ~are_floats(reference)[reference.dtype.codes[rows]] & ~candidate.reordered[alignment.candidate[pairs]]
    shapes = ((pair, reference.shape(int(alignment.reference[pair]))) for pair in pairs[flags].tolist())
    return [pair for pair, shape in shapes if len(shape) > 1 and np.prod(shape[1:-1]) == 1]


def padding_masks(reference: Side, alignment: Alignment) -> list[int]:
    """Return the reference's rows of masks that the model is given, one number for each position."""
    rows = alignment.reference
    inputs = rows[reference.kind.among(("input",))[rows] & reference.module.among(("",))[rows]].tolist()
    return [
        row
        for row in inputs
        if "mask" in reference.path[row] and len(reference.shape(row)) == 2 and reference.zeros[row]
    ]
