"""Micro batches as one more axis: several of one side are joined where the other side has fewer of the same step.

Rows of an activation in micro batch m come after those of the batches before; the gradients of parameters are summands.
Digest and sketch of an activation belong to its own micro batch, so this needs the bytes of both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tensortap.compare.join.pieces import MICRO, Ints, Pieces
from tensortap.core.placement import Placement

__all__ = ["batches_of", "join_micro_batches", "steps_split_otherwise"]

Batches = dict[int, dict[int, int]]
"""By step: the rows of the whole batch, by micro step."""
_VALUES = ("input", "output", "grad_input", "grad_output")
_SUMMED = ("grad_input", "grad_output", "param_grad")
"""Kinds that are summands of the whole batch's, unless they have rows of their own for each sample."""


def batches_of(pieces: Pieces) -> Batches:
    """Return the batches of a run, from the first input of its root."""
    spots = [at for at, spot in enumerate(pieces.spots) if spot[:3] == ("forward", "", "input")]
    found: Batches = {}
    for row in np.flatnonzero(np.isin(pieces.spot, spots)).tolist():
        shape = _whole(pieces, row)
        if shape:
            found.setdefault(int(pieces.step[row]), {}).setdefault(int(pieces.micro[row]), shape[0])
    return found


def steps_split_otherwise(ours: Batches, theirs: Batches) -> set[int]:
    """Return the steps that two runs split into other numbers of micro batches of the same rows in all."""
    return {
        step
        for step in ours.keys() & theirs.keys()
        if len(ours[step]) != len(theirs[step]) and sum(ours[step].values()) == sum(theirs[step].values())
    }


def join_micro_batches(
    pieces: Pieces, batches: Batches, steps: set[int], rank_first: bool = False
) -> tuple[Pieces, Ints]:
    """Return the pieces with micro batches of some steps as members of one identity, and the rows that were moved.

    Each rank becomes as many members as it has micro batches. rank_first: the rows of a rank, over all of its micro
    batches, come before those of the next rank.
    """
    count = max(len(batches[step]) for step in steps)
    micro, placement = pieces.micro.copy(), pieces.placement.copy()
    member = np.zeros(len(pieces), np.int64)
    placements = list(pieces.placements)
    known: dict[tuple[int, int, int, int, str], int] = {}
    moved = []
    flows = np.array([spot[0] in ("forward", "backward") for spot in pieces.spots], bool)[pieces.spot]
    for row in np.flatnonzero(flows & np.isin(pieces.step, list(steps))).tolist():
        step, at = int(pieces.step[row]), int(pieces.micro[row])
        kind, number = pieces.spots[int(pieces.spot[row])][2], int(placement[row])
        if number < 0 and len(pieces.ranks) > 1:
            continue
        spot = (number, int(pieces.form[row]) if number < 0 else -1, step, at if kind in _VALUES else -1, kind)
        if spot not in known:
            own = pieces.placements[number] if number >= 0 else _of_whole(pieces, row)
            found = _shifted(own, batches[step], at, rank_first) if kind in _VALUES else None
            if found is None and kind in _SUMMED:
                found = replace(own, axes={**own.axes, MICRO: "partial:sum"})
            known[spot] = -1 if found is None else len(placements)
            placements += [] if found is None else [found]
        if known[spot] < 0:
            continue
        placement[row], micro[row], member[row] = known[spot], 0, at
        if kind in _VALUES and MICRO not in placements[known[spot]].partials:
            moved.append(row)
    ranks = tuple(rank for rank in pieces.ranks for _ in range(count))
    found_pieces = replace(
        pieces,
        ranks=ranks,
        place=pieces.place * count + member,
        member=np.tile(np.arange(count), len(pieces.ranks)),
        micro=micro,
        placement=placement,
        placements=placements,
    )
    return found_pieces.identified(), np.array(moved, np.int64)


def _whole(pieces: Pieces, row: int) -> tuple[int, ...]:
    number = int(pieces.placement[row])
    return pieces.placements[number].shape if number >= 0 else pieces.forms[int(pieces.form[row])][1]


def _of_whole(pieces: Pieces, row: int) -> Placement:
    return Placement.of_whole(pieces.forms[int(pieces.form[row])][1], {}, "layout")


def _shifted(own: Placement, batch: Mapping[int, int], at: int, rank_first: bool) -> Placement | None:
    """Return the placement of one micro batch in the whole batch; None if the first dimension is not the batch."""
    if own.flat or not own.shape or own.shape[0] != batch.get(at):
        return None
    start = sum(rows for micro, rows in batch.items() if micro < at)
    if rank_first and len(set(batch.values())) == 1:
        places = [(box[0][0], box[0][1] * len(batch) + at * box[0][2], box[0][2]) for box in own.boxes]
    else:
        places = [(box[0][0], box[0][1] + start, box[0][2]) for box in own.boxes]
    boxes = tuple((place, *box[1:]) for place, box in zip(places, own.boxes, strict=True))
    shape = (sum(batch.values()), *own.shape[1:])
    return replace(own, shape=shape, boxes=boxes, axes={**own.axes, MICRO: "shard"})
