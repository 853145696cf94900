"""Masks compared by their sketches, where their elements were not stored.

The sketch of a mask is that of its pattern up to a factor, because elements at the edge count as 1 in it. So summaries
suffice to count the elements that only one side hides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.measure.mask_conventions import FLAGS, NONE, NUMBER, SUM, conventions, words_of
from tensortap.compare.measure.masks import MaskDifference
from tensortap.core.sketches import fold
from tensortap.kernels import summarize

__all__ = ["hidden_pattern", "pattern_differences"]

Array = npt.NDArray[Any]
_FACTOR = 1e-6
"""Distance of the cosine of two sketches from 1 up to which one is a multiple of the other."""


def pattern_differences(
    reference: Side, candidate: Side, alignment: Alignment, pairs: Sequence[int]
) -> dict[int, MaskDifference]:
    """Compare masks by their sketches: an estimate of how many elements only one side hides. The sketch of a sum of
    masks does not show which elements it hides, so that only their number is compared."""
    if not pairs:
        return {}
    sides = (reference, alignment.reference), (candidate, alignment.candidate)
    size = min(side.sketch_size for side, _ in sides)
    known = [(side, rows, conventions(side)) for side, rows in sides]
    found = {}
    for pair in pairs:
        both = [int(codes[rows[pair]]) for _, rows, codes in known]
        at = [(side, int(rows[pair])) for side, rows, _ in known]
        patterns, hidden = [], []
        for (side, row), code in zip(at, both, strict=True):
            elements = int(side.elements[row])
            hidden.append(_count_hidden(side, row, code))
            if side.has_sketch[row]:
                patterns.append(_pattern(side.sketches_at(np.array([row]), size)[0], code, side, row))
        names = words_of(both, *(str(side.dtype[row]) for side, row in at))
        if SUM in both:
            same = both == [SUM, SUM] and len(patterns) == 2 and _are_proportional(*patterns)
            beyond = any(side.edge[row] or side.neginf[row] for side, row in at)
            if same or beyond or both != [SUM, SUM]:  # else they may be other numbers
                more = abs(hidden[0] - hidden[1])
                exact = same and not more
                found[pair] = MaskDifference(more, elements, elements - hidden[0], exact, words=names)
            continue
        if len(patterns) < 2:
            continue
        apart = _apart(*patterns)
        inverted = (both[0] == FLAGS) != (both[1] == FLAGS) and not _apart(
            patterns[0], -_all(elements, patterns[1].size) - patterns[1]
        )
        differing = min(elements, max(apart, abs(hidden[0] - hidden[1])))
        passed, ambiguous = elements - hidden[0], inverted and sum(hidden) == elements
        found[pair] = MaskDifference(differing, elements, passed, not differing, ambiguous, names)
    return found


def hidden_pattern(side: Side, rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, Array | None]]:
    """Yield the rows that are masks, how many elements each hides, and the sketch of these; None if it is not known."""
    codes = conventions(side)
    for row in rows[codes[rows] > NONE].tolist():
        code = int(codes[row])
        yield row, _count_hidden(side, row, code), _sketch_of(side, row, code)


def _count_hidden(side: Side, row: int, convention: int) -> int:
    zeros = int(side.zeros[row])
    return zeros if convention == FLAGS else int(side.elements[row]) - zeros


def _sketch_of(side: Side, row: int, code: int) -> Array | None:
    if code == SUM or not side.has_sketch[row]:
        return None
    return _pattern(side.sketches_at(np.array([row]))[0], code, side, row)


def _are_proportional(ours: Array, theirs: Array) -> bool:
    """Whether two sketches are those of the same numbers times a factor."""
    product = float(np.linalg.norm(ours) * np.linalg.norm(theirs))
    return abs(float(ours @ theirs)) >= (1 - _FACTOR) * product > 0


def _apart(ours: Array, theirs: Array) -> float:
    """Return the squared distance of two patterns, which estimates how many elements differ; 0 if it is rounding."""
    apart = float(np.square(ours - theirs).sum())
    return 0.0 if apart < 0.25 else max(1.0, apart)


def _pattern(sketch: Array, convention: int, side: Side, row: int) -> Array:
    """Return the sketch of what a mask hides, each hidden element as -1."""
    wide: Array = sketch.astype(np.float64)
    if convention == FLAGS:
        return wide - _all(int(side.elements[row]), wide.size)
    return wide / abs(float(side.min[row])) if convention == NUMBER else wide


@cache
def _all(elements: int, size: int) -> Array:
    """Return the sketch of so many ones, of so many sums."""
    found: Array = fold(summarize(np.ones(elements, bool)).sketch[None], size)[0].astype(np.float64)
    return found
