"""Positions of which attention makes whatever its implementation likes: those that see nothing, and padding.

A mask may hide all elements from a position, as from padding in front of a causal text. One implementation returns the
mean of everything there, another one zero. Kernels that leave padding out return zero at all of it. Few losses read
these positions, so they are left out of a pair's difference; `judge.read_hidden` has those that do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tensortap.kernels import difference
from tensortap.kernels.pairs.reference import PairMeasure
from tensortap.kernels.summary.visible import Positions, along, in_copies

__all__ = [
    "AGREES",
    "EXPLAINS",
    "EXTREMES_AGREE",
    "FOLLOWS_HIDDEN",
    "UNREAD_POSITIONS",
    "HiddenPositions",
    "blind_positions",
    "nearest_tokens",
    "see_nothing",
]

Array = npt.NDArray[Any]

EXPLAINS = 2.0
"""Times that a pair is further off with hidden positions, from which on they are what makes it differ."""
_NEAR, _ROUNDED, _TIMES, _SHORT = 4, 64.0, 8.0, 2.0**-6
"""Neighbours among which a token's equal is looked for; epsilons by which the two may differ, or times as much as most
tokens do, if these differ by no more than the rounding of short numbers."""
AGREES, _SAME = 2.0**-6, 2.0**-10
"""Relative difference up to which values may agree at positions that are not hidden: rounding of short numbers, also
where it is kept in long ones. And that of numbers that attention makes of the same."""
EXTREMES_AGREE = "it differs beside a mask that hides positions, and its largest or its smallest element agrees"
UNREAD_POSITIONS = "it differs at positions that a mask hides, while all others agree"

FOLLOWS_HIDDEN = "it has no axis of positions, and is made from what differs at positions that a mask hides"


def blind_positions(hidden: Array) -> Positions | None:
    """Return the positions from which a mask hides everything, given what it hides by query and key, the last two axes.

    None if the mask has no batch: then its axes may be others. With a single key it is no mask of keys, but a flag of
    each position.
    """
    if hidden.ndim < 3 or hidden.shape[-1] < 2:
        return None
    heads = tuple(range(1, hidden.ndim - 2))
    return np.asarray(np.all(hidden, axis=(*heads, hidden.ndim - 1)), bool)


def nearest_tokens(ours: Array, theirs: Array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return how far each row is from the nearest one of the other side, at any place, and its norm."""
    left, right = (each.reshape(len(each), -1).astype(np.float64) for each in (ours, theirs))
    direction = np.random.default_rng(0).standard_normal(left.shape[1])
    places = np.argsort(right @ direction)
    first = np.searchsorted((right @ direction)[places], left @ direction)
    near = [places[np.clip(first + step, 0, len(places) - 1)] for step in range(-_NEAR, _NEAR)]
    apart = np.min([np.linalg.norm(left - right[each], axis=1) for each in near], axis=0)
    return apart, np.linalg.norm(left, axis=1)


def _tokens_without_equal(ours: Array, theirs: Array) -> npt.NDArray[np.bool_]:
    """Return which rows have none on the other side, at any place, that is equal up to rounding."""
    apart, sizes = nearest_tokens(ours, theirs)
    off = np.divide(apart, sizes, out=np.where(apart > 0, np.inf, 0.0), where=sizes > 0)
    epsilon = max(float(ml_dtypes.finfo(each.dtype).eps) for each in (ours, theirs))
    # Numbers in a long dtype may have been computed in a short one.
    usual = float(np.median(off))
    allowed = max(_ROUNDED * epsilon, _TIMES * usual if usual <= _SHORT else 0.0)
    return np.asarray(off > allowed)


def see_nothing(positions: Positions, ours: Array, theirs: Array) -> bool:
    """Whether two tensors differ at some positions alone, and one side has the same numbers wherever they do in a text:
    what attention makes of nothing is zero, or the mean of everything."""
    where = along(positions, ours.shape)
    if where is None or where.shape[0] != len(positions) or ours.shape != theirs.shape or ours.ndim < 2:
        return False
    if are_flags(ours, theirs):
        return False
    shown = [np.where(where, 0.0, each.astype(np.float64)) for each in (ours, theirs)]
    size = float(np.linalg.norm(shown[0]))
    if not float(np.linalg.norm(shown[0] - shown[1])) <= AGREES * size:
        return False
    axis = where.shape.index(positions.shape[1], 1)
    sides = [np.moveaxis(each.astype(np.float64), axis, 1) for each in (ours, theirs)]
    apart = np.abs(sides[0] - sides[1]).reshape(*positions.shape, -1).max(axis=2, initial=0.0)
    differ = positions & (apart > AGREES * max(float(np.abs(each).max(initial=0.0)) for each in sides))
    return any(_is_one(each, differ) for each in sides)


def are_flags(ours: Array, theirs: Array) -> bool:
    """Whether two tensors have one number for each token, and it is 0 or 1: they may say what is hidden, and are no
    consequence of that. A mask by query and key may say anything about a hidden query."""
    return ours.ndim <= 2 and all(
        each.dtype.kind == "b" or bool(((each == 0) | (each == 1)).all()) for each in (ours, theirs)
    )


def _is_one(array: Array, positions: Positions) -> bool:
    """Whether a tensor by text and position has the same numbers at all these positions of a text: zeros, or several
    times the same."""
    several = False
    for text, hidden in zip(array, positions, strict=True):
        rows = text[hidden]
        if not len(rows):
            continue
        if not np.abs(rows - rows[:1]).max(initial=0.0) <= _SAME * np.abs(rows).max(initial=0.0):
            return False
        several = several or len(rows) > 1 or not rows.any()
    return several


class HiddenPositions:
    """The positions that the masks of one forward pass hide, by the size of batch and sequence."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Positions] = {}
        self._in_copies: set[int] = set()
        """Lengths of tensors that were seen to consist of copies of all positions."""

    def add(self, positions: Positions | None) -> None:
        if positions is None or not positions.any():
            return
        known = self._known.get(positions.shape)
        self._known[positions.shape] = positions if known is None else known | positions

    def __bool__(self) -> bool:
        return bool(self._known)

    def _are_copies(self, length: int, shown: PairMeasure, whole: PairMeasure) -> bool:
        """Whether tensors of a length consist of copies of all positions: hidden ones explain what differs in one.
        Tokens may be in another order as well."""
        if not whole.difference.rel_l2 <= EXPLAINS * shown.difference.rel_l2:
            self._in_copies.add(length)
        return length in self._in_copies

    def rows(self, shape: tuple[int, ...]) -> set[int] | None:
        """Return which rows of a tensor, along its last axis, are at hidden positions; None if it has no such axes."""
        for positions in self._known.values():
            where = along(positions, shape)
            if where is not None:
                return set(np.flatnonzero(np.broadcast_to(where, shape)[..., 0]).tolist())
        return None

    def overlay(self, ours: Array, theirs: Array) -> Array:
        """Return the candidate's tensor with the reference's elements at the hidden positions, if it has their axes."""
        for positions in self._known.values():
            where = along(positions, ours.shape)
            if where is not None and ours.shape == theirs.shape:
                return np.where(where, ours.astype(theirs.dtype), theirs)
        return theirs

    def may_be_sorted(self, ours: Array, theirs: Array) -> bool:
        """Whether a list of tokens, one for each position, may have them in another order, as sorted by their experts:
        no more of them have no equal on the other side than are hidden, and none at the places of these.

        Ask if the hidden positions do not explain what differs.
        """
        for positions in self._known.values():
            where = along(positions, ours.shape)
            if where is None:
                continue
            if len(where) != positions.size or any(each.dtype.kind in "biu" for each in (ours, theirs)):
                return False
            hidden = positions.reshape(-1)
            without = _tokens_without_equal(ours, theirs), _tokens_without_equal(theirs, ours)
            return all(np.count_nonzero(e) <= np.count_nonzero(hidden) and not (e & hidden).any() for e in without)
        return False

    def measure_shown(
        self, ours: Array, theirs: Array, rtol: float | None = None, atol: float | None = None
    ) -> PairMeasure | None:
        """Measure a pair without the hidden positions; None if it does not have their axes, or may say itself what is
        hidden."""
        if are_flags(ours, theirs):
            return None
        for find in (along, in_copies):
            for positions in self._known.values():
                where = find(positions, ours.shape)
                if where is None:
                    continue
                arrays = (np.where(where, np.zeros((), each.dtype), each) for each in (ours, theirs))
                shown = difference(*arrays, rtol=rtol, atol=atol)
                if find is in_copies and not self._are_copies(len(ours), shown, difference(ours, theirs)):
                    return None
                return replace(shown, difference=replace(shown.difference, equal=False))  # the whole tensors are not
        return None
