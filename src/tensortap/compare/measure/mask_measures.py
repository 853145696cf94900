"""Measure the pairs that are masks: from their elements where both sides stored them, else from their sketches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.measure.mask_pairs import equal_flags, equal_masks, mask_pairs, reshaped_mask_pairs
from tensortap.compare.measure.mask_sketches import pattern_differences
from tensortap.compare.measure.masks import MaskDifference, equal_mask, mask_difference, reshaped_mask_difference
from tensortap.compare.measure.measures import Measures
from tensortap.compare.measure.visible import have_same_padding

__all__ = ["measure_masks"]

_OTHER_SHAPE = "masks of two shapes, of which summaries do not show whether they hide the same"
_SUM_OF_MASKS = "sums of masks, of which summaries do not show whether they hide the same"
_TWO_SHAPES = "of one shape", "of another"


def measure_masks(
    measures: Measures, reference: Side, candidate: Side, alignment: Alignment, pairs: npt.NDArray[np.int64]
) -> None:
    """Compare masks by what they hide: from their elements where both sides stored them, else from their sketches."""
    of_two_shapes = reshaped_mask_pairs(reference, candidate, alignment, np.flatnonzero(measures.reshaped))
    known: dict[tuple[int, int], Any] = {}
    from_sketches = []
    for pair in (*mask_pairs(reference, candidate, alignment, pairs), *of_two_shapes):
        left, right = int(alignment.reference[pair]), int(alignment.candidate[pair])
        if reference.kept[left] and candidate.kept[right]:
            tensors = int(reference.tensor_id[left]), int(candidate.tensor_id[right])
            if tensors not in known:
                compare = reshaped_mask_difference if measures.reshaped[pair] else mask_difference
                known[tensors] = compare(reference.array(left), candidate.array(right))
            if known[tensors] is not None:
                measures.take_mask(pair, known[tensors])
        elif measures.reshaped[pair]:
            elements = int(reference.elements[left])
            measures.take_mask(pair, MaskDifference(0.0, elements, elements, False, words=_TWO_SHAPES))
            measures.limits[pair] = _OTHER_SHAPE
        else:
            from_sketches.append(pair)
    for pair, found in pattern_differences(reference, candidate, alignment, from_sketches).items():
        measures.take_mask(pair, found)
        if not found.exact and not found.differing:
            measures.limits[pair] = _SUM_OF_MASKS
    if len(pairs):
        _keep_equal_masks(measures, reference, candidate, alignment)


def _keep_equal_masks(measures: Measures, reference: Side, candidate: Side, alignment: Alignment) -> None:
    """Keep masks that are equal and hide everything from some positions: each kind of attention makes something else of
    these. Summaries do not show that, but whether the batch has padding."""
    known: dict[int, MaskDifference | None] = {}
    padded = {pair: mask for pair, mask in measures.masks.items() if mask.positions is None and not mask.differing}
    for pair in equal_masks(reference, candidate, alignment, measures.equal):
        row = int(alignment.reference[pair])
        tensor = int(reference.tensor_id[row])
        if not reference.kept[row]:
            elements = int(reference.elements[row])
            padded[pair] = MaskDifference(0.0, elements, elements, False)
        elif tensor not in known:
            known[tensor] = equal_mask(reference.array(row))
        if (found := known.get(tensor)) is not None:
            measures.masks[pair] = found
    if not measures.masks and not padded:  # code that makes its masks inside: the padding alone is known
        for pair in equal_flags(reference, candidate, alignment, measures.equal):
            if not reference.kept[row := int(alignment.reference[pair])]:
                padded[pair] = MaskDifference(0.0, elements := int(reference.elements[row]), elements, False)
    if padded and have_same_padding(reference, candidate):
        measures.masks |= {pair: replace(mask, is_padded=True) for pair, mask in padded.items()}
