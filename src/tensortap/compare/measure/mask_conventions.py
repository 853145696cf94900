"""How masks say what they hide: boolean, as numbers 0 and 1, or additive.

A boolean mask, and numbers 0 and 1, hide where they are 0. An additive mask hides where it is the edge of its dtype's
range, -inf, or one number so low that no softmax shows it. Which it is follows from the summary alone: a tensor of two
values is known from its counts, its range and its L1 norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Bools, Side
from tensortap.core import dtypes
from tensortap.core.records import Summary
from tensortap.kernels import summarize

__all__ = [
    "EDGE",
    "FLAGS",
    "NONE",
    "NUMBER",
    "OPEN",
    "SUM",
    "are_floats",
    "conventions",
    "hidden_by",
    "mask_of",
    "word_of",
    "words_of",
]

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.int8]
NONE, OPEN, FLAGS, NUMBER, EDGE, SUM = range(6)
"""No mask; all zeros; 0 and 1 with 1 for what it lets through; 0 and one low number; 0 and the edge or -inf; 0 and
several low numbers, with or without the edge or -inf, as the sum of a causal mask and one of padding."""
_WORDS = {OPEN: "all zeros", FLAGS: "0 and 1", NUMBER: "additive", EDGE: "additive", SUM: "additive"}
_LOW = -50.0
"""A summand from which on nothing is left of an element after a softmax: its share is below any dtype's rounding."""
_SUMMAND = -9e3
"""The mean of the low numbers in a sum of masks. Biases of attention, as for distances, are nearer to zero."""
_ALIKE = 0.64
"""Squared mean over mean square from which on numbers are alike: four times the least of them is the greatest."""


def conventions(side: Side) -> Codes:
    """Return for each record which kind of mask it is, from its summary."""
    if not len(side):
        return np.empty(0, np.int8)
    numbers = (
        side.elements,
        side.nan,
        side.posinf,
        side.neginf,
        side.zeros,
        side.edge,
        side.min,
        side.max,
        side.l1,
        side.l2,
    )
    return _codes_of(are_floats(side)[side.dtype.codes], *numbers)


def mask_of(array: Array, summary: Summary | None = None) -> int:
    """Return which kind of mask an array is. `summary`: its own, if it is known."""
    name = dtypes.name_of(array.dtype)
    if array.dtype.kind == "c":
        return NONE
    s = summarize(array) if summary is None else summary
    numbers = (s.elements, s.nan, s.posinf, s.neginf, s.zeros, s.edge, s.min, s.max, s.l1, s.l2)
    columns = (np.array([number]) for number in numbers)
    found = int(_codes_of(np.array([dtypes.edge_of(name) < np.inf]), *columns)[0])
    return NONE if found == SUM and ((array < 0) & (array > _LOW)).any() else found


def are_floats(side: Side) -> Bools:
    """Return for each dtype of a side whether it is one of the floats that additive masks have."""
    words = side.dtype.words
    return np.array([dtypes.edge_of(word) < np.inf and not word.startswith("complex") for word in words], bool)


def _codes_of(
    real: Any,
    elements: Any,
    nan: Any,
    posinf: Any,
    neginf: Any,
    zeros: Any,
    edge: Any,
    low: Any,
    high: Any,
    l1: Any,
    l2: Any,
) -> Codes:
    """Return conventions from columns of summaries. `real`: whether a dtype is one of `are_floats`."""
    others = elements - zeros
    ordinary = others - edge - neginf
    with np.errstate(invalid="ignore", over="ignore"):
        flags = (low >= 0) & (high <= 1) & (nan + posinf + neginf == 0) & (others > 0) & (l1 == others)
        flags |= ~np.asarray(real) & (zeros == elements) & (elements > 0)
        additive = real & (nan + posinf == 0) & (elements > 1)
        number = additive & (edge + neginf == 0) & (high == 0) & (low <= _LOW)
        number &= np.abs(l1 + low * others) <= 1e-6 * np.abs(low)
        at_edge = additive & (edge + neginf > 0) & (edge + neginf == others) & ~(high > 0)
        summed = additive & (high == 0) & (ordinary > 0) & ~number & (l1 >= -_SUMMAND * ordinary)
        summed &= np.square(l1) >= _ALIKE * ordinary * np.square(l2)
    found = np.where(additive & (zeros == elements), OPEN, NONE)  # np.select fails where np.bool is replaced
    for condition, code in ((at_edge, EDGE), (number, NUMBER), (summed, SUM), (flags, FLAGS)):
        found = np.where(condition, code, found)
    return found.astype(np.int8)


def hidden_by(array: Array, convention: int) -> Array:
    """Return which elements a mask of a convention hides."""
    hidden: Array = array == 0 if convention == FLAGS else array != 0
    return hidden


def word_of(convention: int, dtype: object) -> str:
    """Return what a mask of a convention and a dtype is called."""
    return "boolean" if str(dtype) == "bool" else _WORDS[convention]


def words_of(both: Sequence[int], *both_dtypes: object) -> tuple[str, str]:
    """Return what the masks of both sides are called."""
    ours, theirs = map(word_of, both, both_dtypes)
    return ours, theirs
