"""Measures pairs again without the positions that a mask hides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Side
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.structure import Structure
from tensortap.compare.matched import Matched
from tensortap.compare.measure.hidden import EXPLAINS, HiddenPositions
from tensortap.compare.measure.mask_pairs import padding_masks
from tensortap.compare.measure.masks import padding_positions
from tensortap.compare.measure.tensors import Tolerances

__all__ = ["hidden_positions", "leave_out_hidden", "scope_of", "without_padding"]


def without_padding(
    matched: Matched, structure: Structure, born: Sequence[int], tolerances: Tolerances
) -> Matched | None:
    """Return the runs with pairs measured without padding, in the forward passes after the first step in which a
    difference is born; None if no pair is.

    Padding is a token whose embedding is nearly zero. An optimizer's step makes noise of it, and a norm enlarges that.
    """
    hidden: dict[tuple[int, int, int], HiddenPositions] = {}
    scopes = {
        structure.scope[row]
        for row in born
        if structure.kind[row] in ("input", "output") and not structure.is_at_start(row)
    }
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    for row in padding_masks(left, alignment) if scopes else ():
        scope = _scope_at(left, row)
        if scope in scopes and left.kept[row]:
            hidden.setdefault(scope, HiddenPositions()).add(padding_positions(left.array(row)))
    if not any(hidden.values()):
        return None
    found = replace(matched, measures=deepcopy(matched.measures))
    whole = left.kept[alignment.reference] & right.kept[alignment.candidate]
    _measure_without(
        found, np.flatnonzero(whole & ~found.measures.equal & ~found.measures.reshaped), hidden, tolerances
    )
    return found if len(found.measures.shown) > len(matched.measures.shown) else None


def leave_out_hidden(matched: Matched, pairs: npt.NDArray[np.int64], tolerances: Tolerances) -> None:
    """Measure pairs again without positions that a mask hides, where they differ there by more than rounding."""
    _measure_without(matched, pairs, hidden_positions(matched), tolerances)


def _measure_without(
    matched: Matched,
    pairs: npt.NDArray[np.int64],
    hidden: Mapping[tuple[int, int, int], HiddenPositions],
    tolerances: Tolerances,
) -> None:
    """Measure pairs again without the positions that are hidden in their forward pass."""
    left, right, alignment, measures = matched.reference, matched.candidate, matched.alignment, matched.measures
    if not any(hidden.values()):
        return
    from_loss = left.kind.among(("grad_output",)) & left.module.among(("",))  # shows whether the loss reads them
    for pair in pairs[(left.phase.among(("forward",)) | from_loss)[alignment.reference[pairs]]].tolist():
        row, partner = int(alignment.reference[pair]), int(alignment.candidate[pair])
        off = float(measures.rel_l2[pair])
        known = hidden.get(scope_of(matched, pair))
        if off <= Policy.base(left.dtype[row], right.dtype[partner]) or not known or pair in measures.masks:
            continue
        if pair in measures.shown:
            continue
        arrays = left.array(row), right.array(partner)
        if (shown := known.measure_shown(*arrays, *tolerances)) is not None:
            explained = not off <= EXPLAINS * shown.difference.rel_l2
            measures.take_shown(pair, shown, explained)
            if not explained and known.may_be_sorted(*arrays):
                measures.in_other_order.add(pair)


def hidden_positions(matched: Matched) -> dict[tuple[int, int, int], HiddenPositions]:
    """Return by rank, step and micro step the positions that masks in two conventions hide."""
    hidden: dict[tuple[int, int, int], HiddenPositions] = {}
    for pair, mask in matched.measures.masks.items():
        if mask.frees_positions:
            hidden.setdefault(scope_of(matched, pair), HiddenPositions()).add(mask.positions)
    return hidden


def scope_of(matched: Matched, pair: int) -> tuple[int, int, int]:
    return _scope_at(matched.reference, int(matched.alignment.reference[pair]))


def _scope_at(side: Side, row: int) -> tuple[int, int, int]:
    return int(side.rank[row]), int(side.step[row]), int(side.micro[row])
