"""Gradients of single micro batches that one side shows only as a sum.

The hook of a parameter that is divided as a DTensor sees what was accumulated so far. Plain parameters show the
gradient of each micro batch. From the second micro batch on, the two are not the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Bools, Ints, Side
from tensortap.compare.join.source import joined_source
from tensortap.compare.translate.translated import Translated
from tensortap.core.placement import Placement
from tensortap.core.records import Key

__all__ = ["accumulated_on_one_side", "without_accumulated"]


def accumulated_on_one_side(reference: Side, candidate: Side, alignment: Alignment) -> Ints:
    """Return the pairs of a parameter's gradient of which one side has the sum over micro batches up to there."""
    rows, partners = alignment.reference, alignment.candidate
    if not len(rows) or isinstance(candidate, Translated):
        return np.empty(0, np.int64)
    later = np.flatnonzero(reference.kind.among(("param_grad",))[rows] & (reference.micro[rows] > 0))
    if not len(later):
        return later
    differ = _is_accumulated(reference, rows[later]) != _is_accumulated(candidate, partners[later])
    return np.asarray(later[differ], np.int64)


def without_accumulated(reference: Side, candidate: Side, alignment: Alignment) -> tuple[Alignment, list[Key]]:
    """Return the alignment without such pairs, and their keys, if both sides have what the optimizer got instead."""
    pairs = accumulated_on_one_side(reference, candidate, alignment)
    if not len(pairs):
        return alignment, []
    got = np.flatnonzero(reference.kind.among(("step_grad",))[alignment.reference])
    keys = (reference.key(row) for row in alignment.reference[got].tolist())
    known = {(key.step, key.module, key.path) for key in keys}
    of_pairs = {pair: reference.key(int(alignment.reference[pair])) for pair in pairs.tolist()}
    dropped = {pair: key for pair, key in of_pairs.items() if (key.step, key.module, key.path) in known}
    kept = np.ones(len(alignment.reference), bool)
    kept[list(dropped)] = False
    shorter = replace(alignment, reference=alignment.reference[kept], candidate=alignment.candidate[kept])
    return shorter, list(dropped.values())


def _is_accumulated(side: Side, rows: Ints) -> Bools:
    joined = joined_source(side.run)
    if joined is None:
        return np.zeros(len(rows), bool)
    pieces = joined.layout.pieces
    sums = np.array([*(_shows_sums(each) for each in pieces.placements), False], bool)  # the last one: no placement
    found: Bools = sums[pieces.placement[joined.layout.first[joined.groups[side.row[rows]]]]]
    return found


def _shows_sums(placement: Placement) -> bool:
    """Whether a parameter is a DTensor. FSDP2's are not while they are gathered: their gradient is not yet reduced."""
    return placement.source == "dtensor" or (placement.source == "fsdp2" and not placement.partials)
