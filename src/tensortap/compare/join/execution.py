"""One order of execution for the records of all ranks."""

from __future__ import annotations

import numpy as np

from tensortap.compare.join.layout import Layout
from tensortap.compare.join.pieces import Ints, Pieces

__all__ = ["execution_order"]

_STAGES = ("pp", "pipe", "pipeline", "stage", "pp_stage")
"""Names of the axis along which ranks run other layers."""
_SECTIONS = {"param": 0, "buffer": 0, "step_grad": 3}


def execution_order(layout: Layout) -> Ints:
    """Return the groups in an order in which one process would have made them.

    Ranks that run the same modules agree on it. What only some of them have comes after what precedes it there. Stages
    of a pipeline work on several micro batches at a time: there, forwards go through the stages, and backwards return.
    """
    axis = next((name for name in _STAGES if layout.pieces.size(name) > 1), "")
    return _by_stage(layout, axis) if axis else _by_rank(layout)


def _by_rank(layout: Layout) -> Ints:
    pieces = layout.pieces
    position = np.full(len(layout), -1.0)
    group_of = np.empty(len(pieces), np.int64)
    group_of[layout.order] = np.repeat(np.arange(len(layout)), np.diff(layout.begin, append=len(layout.order)))
    for place in range(len(pieces.ranks)):
        groups = group_of[np.flatnonzero(pieces.place == place)]
        new = position[groups] < 0
        if not new.any():
            continue
        before = np.maximum.accumulate(np.where(new, -1, np.arange(len(groups))))
        start = np.where(before >= 0, position[groups[before]], -0.5)
        position[groups[new]] = start[new] + (1 + np.arange(int(new.sum()))) / (2.0 + new.sum())
        known = np.flatnonzero(position >= 0)
        position[known[np.argsort(position[known], kind="stable")]] = np.arange(len(known))
    return np.argsort(position, kind="stable")


def _by_stage(layout: Layout, axis: str) -> Ints:
    pieces, first = layout.pieces, layout.first
    stage = np.array([pieces.coordinate(rank, axis) for rank in pieces.ranks], np.int64)[pieces.place[first]]
    backward = _flags(pieces, 0, ("backward",))[first]
    return np.lexsort(
        (
            pieces.seq[first],
            np.where(backward, -stage, stage),
            backward,
            np.where(_section(pieces)[first] == 1, pieces.micro[first], 0),
            _section(pieces)[first],
            pieces.step[first],
        )
    )


def _section(pieces: Pieces) -> Ints:
    """Order within a step: state before it, passes, evaluation, state after it."""
    state = _flags(pieces, 2, ("param", "buffer"))
    late = np.zeros(len(pieces), bool)
    late[state] = pieces.call[state] > 0
    sections = np.where(state, np.where(late, 4, 0), 1)
    sections[_flags(pieces, 0, ("eval",))] = 2
    sections[_flags(pieces, 2, ("step_grad",))] = 3
    return np.asarray(sections, np.int64)


def _flags(pieces: Pieces, part: int, words: tuple[str, ...]) -> np.ndarray:
    return np.array([spot[part] in words for spot in pieces.spots], bool)[pieces.spot]
