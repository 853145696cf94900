"""Masks are compared by what they hide: the same pattern may be boolean, additive in any dtype, or numbers 0 and 1.

A boolean mask, and numbers 0 and 1, hide where they are 0. An additive mask hides where it is the edge of its dtype's
range, -inf, or one number so low that no softmax shows it. Which it is follows from the summary alone: a tensor of two
values is known from its counts, its range and its L1 norm. The sketch of a mask is that of its pattern up to a factor,
because elements at the edge count as 1 in it; so summaries suffice to count the elements that only one side hides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Bools, Side
from tensortap.compare.measure.hidden import blind_positions
from tensortap.core import dtypes
from tensortap.core.records import Difference, Summary
from tensortap.core.sketches import fold
from tensortap.kernels import difference, summarize
from tensortap.kernels.summary.visible import Positions, padding_of_texts

__all__ = [
    "MaskDifference",
    "boolean_pairs",
    "equal_flags",
    "equal_mask",
    "equal_masks",
    "has_edges",
    "hidden_pattern",
    "in_convention_of",
    "mask_difference",
    "mask_of",
    "mask_pairs",
    "padding_mask",
    "padding_masks",
    "padding_positions",
    "pattern_differences",
    "reshaped_mask_difference",
    "reshaped_mask_pairs",
    "without_edges",
]

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.int8]

NONE, OPEN, FLAGS, NUMBER, EDGE, SUM = range(6)
"""No mask; all zeros; 0 and 1 with 1 for what it lets through; 0 and one low number; 0 and the edge or -inf; 0 and
several low numbers, with or without the edge or -inf, as the sum of a causal mask and one of padding."""
_WORDS = {OPEN: "all zeros", FLAGS: "0 and 1", NUMBER: "additive", EDGE: "additive", SUM: "additive"}
_BROADCAST = "broadcast"
_LOW = -50.0
"""A summand from which on nothing is left of an element after a softmax: its share is below any dtype's rounding."""
_SUMMAND = -9e3
"""The mean of the low numbers in a sum of masks. Biases of attention, as for distances, are nearer to zero."""
_ALIKE = 0.64
"""Squared mean over mean square from which on numbers are alike: four times the least of them is the greatest."""
_FACTOR = 1e-6
"""Distance of the cosine of two sketches from 1 up to which one is a multiple of the other."""
_FORWARD = ("input", "output")


@dataclass(frozen=True)
class MaskDifference:
    """How the patterns of two masks differ."""

    differing: float
    """Number of elements that only one side hides; an estimate if it is not exact."""
    elements: int
    passed: int
    """Number of elements that the reference lets through."""
    exact: bool
    ambiguous: bool = False
    """Whether the masks are equal if True means "hidden" on the boolean side, as some modules read it."""
    words: tuple[str, str] = ("", "")
    """The convention of the reference and of the candidate."""
    positions: Positions | None = field(default=None, compare=False, repr=False)
    """Positions of which attention makes whatever its implementation likes; None if they are not known."""
    is_padded: bool = False
    """Whether the model was given a batch with padding, if the positions are not known."""

    @property
    def frees_positions(self) -> bool:
        """Whether both sides hide the same, and two kinds of attention may make something else of some positions.

        If it is not known whether a mask hides everything from a position, one in two conventions may.
        """
        if self.positions is None:
            return not self.differing and (self.words[0] != self.words[1] or self.is_padded)
        return not self.differing and bool(self.positions.any())

    @property
    def error(self) -> float:
        """The relative L2 error of the pattern."""
        return float(np.sqrt(self.differing / max(1, self.passed)))

    def as_difference(self) -> Difference:
        share = self.differing / max(1, self.elements)
        return Difference(
            elements=self.elements,
            equal=False,
            exact=self.exact,
            rel_l2=self.error,
            rel_l2_bar=0.0 if self.exact else 0.1 * self.error,
            cosine=1.0 if not self.differing else float("nan"),
            l2=float(np.sqrt(self.differing)),
            max_abs=float(self.differing > 0),
            max_ulp=float(self.differing > 0),
            mismatched=share,
            row_rel_l2=0.0 if not self.differing else float("nan"),
        )


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
    return _conventions(_real(side)[side.dtype.codes], *numbers)


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


def _real(side: Side) -> Bools:
    """Return for each dtype of a side whether it is one of the floats that additive masks have."""
    words = side.dtype.words
    return np.array([dtypes.edge_of(word) < np.inf and not word.startswith("complex") for word in words], bool)


def _conventions(
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


def has_edges(reference: Side, candidate: Side, alignment: Alignment) -> Bools:
    """Return for each pair whether a side has elements at the edge of its dtype's range."""
    if not len(alignment.reference):
        return np.zeros(0, bool)
    found: Bools = (reference.edge[alignment.reference] > 0) | (candidate.edge[alignment.candidate] > 0)
    return found


def mask_pairs(reference: Side, candidate: Side, alignment: Alignment, open_pairs: npt.NDArray[np.int64]) -> list[int]:
    """Return the pairs that are masks on both sides. Numbers 0 and 1 on both sides are compared as numbers."""
    if not len(open_pairs):
        return []
    rows, partners = alignment.reference[open_pairs], alignment.candidate[open_pairs]
    left, right = conventions(reference)[rows], conventions(candidate)[partners]
    hiding = (left > OPEN) | (right > OPEN)
    masks = (left > NONE) & (right > NONE) & hiding & ~((left == FLAGS) & (right == FLAGS))
    # Ones against zeros of one kind of dtype are numbers, not two ways to hide nothing.
    real = [_real(side)[side.dtype.codes[which]] for side, which in ((reference, rows), (candidate, partners))]
    masks &= ~((left + right == OPEN + FLAGS) & (real[0] == real[1]))
    masks &= reference.kind.among(_FORWARD)[rows] & ~candidate.reordered[partners]
    found: list[int] = open_pairs[masks].tolist()
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


def padding_mask(array: Array) -> MaskDifference | None:
    """Return how an array, which both sides have, frees the padding of texts, should attention hide everything from
    some of it; None if it has none."""
    if (positions := padding_of_texts(array)) is None:
        return None
    words = ("padding alone", "padding alone")
    return MaskDifference(0.0, array.size, int(np.count_nonzero(array)), True, words=words, positions=positions)


def equal_flags(reference: Side, candidate: Side, alignment: Alignment, equal: Bools) -> list[int]:
    """Return the pairs of inputs that are equal, and that consist of 0 and 1, one for each text and token."""
    pairs = np.flatnonzero(equal)
    if not len(pairs):
        return []
    rows = alignment.reference[pairs]
    flags = (conventions(reference)[rows] == FLAGS) & reference.kind.among(("input",))[rows]
    flags &= (reference.zeros[rows] > 0) & (reference.zeros[rows] < reference.elements[rows])
    flags &= ~_real(reference)[reference.dtype.codes[rows]] & ~candidate.reordered[alignment.candidate[pairs]]
    shapes = ((pair, reference.shape(int(alignment.reference[pair]))) for pair in pairs[flags].tolist())
    return [pair for pair, shape in shapes if len(shape) > 1 and np.prod(shape[1:-1]) == 1]


def equal_mask(array: Array, summary: Summary | None = None) -> MaskDifference | None:
    """Return how an array, which both sides have, frees positions as a mask; None if it does not."""
    kind = mask_of(array, summary) if array.ndim > 2 else NONE
    if kind in (NONE, OPEN) or (kind == FLAGS and array.dtype.kind != "b"):
        return None
    hidden = _hidden(array, kind)
    positions = blind_positions(hidden)
    if positions is None or not positions.any() or (kind == FLAGS and not _lets_true_through(array, positions)):
        return None
    words, passed = _names((kind, kind), array.dtype, array.dtype), int(array.size - np.count_nonzero(hidden))
    return MaskDifference(0.0, array.size, passed, True, words=words, positions=positions)


def _lets_true_through(array: Array, blind: Positions) -> bool:
    """Whether True lets something through in a boolean mask, as far as it shows. Some modules take True as "hidden":
    then a position from which nothing is hidden looks as if it saw nothing.

    If True lets something through, a position that sees anything sees itself, and no text is hidden as a whole.
    """
    if blind.all(axis=-1).any():
        return False
    if array.shape[-1] != array.shape[-2]:
        return True
    heads = tuple(range(1, array.ndim - 2))
    return bool((blind | np.diagonal(array, axis1=-2, axis2=-1).any(axis=heads)).all())


def padding_masks(reference: Side, alignment: Alignment) -> list[int]:
    """Return the reference's rows of masks that the model is given, one number for each position."""
    rows = alignment.reference
    inputs = rows[reference.kind.among(("input",))[rows] & reference.module.among(("",))[rows]].tolist()
    return [
        row
        for row in inputs
        if "mask" in reference.path[row] and len(reference.shape(row)) == 2 and reference.zeros[row]
    ]


def padding_positions(array: Array) -> Positions | None:
    """Return the positions that a mask of 0 and 1 hides; None if it is another array. True may mean either."""
    return array == 0 if array.dtype.kind in "iuf" and np.isin(array, (0, 1)).all() else None


def mask_of(array: Array, summary: Summary | None = None) -> int:
    """Return which kind of mask an array is. `summary`: its own, if it is known."""
    name = dtypes.name_of(array.dtype)
    if array.dtype.kind == "c":
        return NONE
    s = summarize(array) if summary is None else summary
    numbers = (s.elements, s.nan, s.posinf, s.neginf, s.zeros, s.edge, s.min, s.max, s.l1, s.l2)
    columns = (np.array([number]) for number in numbers)
    found = int(_conventions(np.array([dtypes.edge_of(name) < np.inf]), *columns)[0])
    return NONE if found == SUM and ((array < 0) & (array > _LOW)).any() else found


def mask_difference(ours: Array, theirs: Array) -> MaskDifference | None:
    """Compare two arrays by what they hide; None if they are not both masks, or numbers 0 and 1 on both sides."""
    left, right = mask_of(ours), mask_of(theirs)
    if NONE in (left, right) or max(left, right) == OPEN or left == right == FLAGS:
        return None
    if left + right == OPEN + FLAGS and all(dtypes.edge_of(dtypes.name_of(a.dtype)) < np.inf for a in (ours, theirs)):
        return None
    if left == right == SUM and not _may_be_sums(ours, theirs):
        return None
    hidden = _hidden(ours, left), _hidden(theirs, right)
    differing = int(np.count_nonzero(hidden[0] != hidden[1]))
    ambiguous = (left == FLAGS) != (right == FLAGS) and differing == ours.size > 0
    passed = int(ours.size - np.count_nonzero(hidden[0]))
    words, positions = _names((left, right), ours.dtype, theirs.dtype), blind_positions(hidden[0] & hidden[1])
    return MaskDifference(differing, ours.size, passed, True, ambiguous, words, positions)


def _may_be_sums(ours: Array, theirs: Array) -> bool:
    """Whether two arrays of several low numbers are masks, and not other numbers: one reaches the edge of its dtype's
    range, or they are the same numbers times a factor."""
    wide = [_as_infinite(each) for each in (ours, theirs)]
    if any(np.isinf(each).any() for each in wide):
        return True
    return bool(np.allclose(wide[0] * (wide[1].min() / wide[0].min()), wide[1], rtol=_FACTOR, atol=0))


def reshaped_mask_difference(ours: Array, theirs: Array) -> MaskDifference | None:
    """Compare two masks of different shapes by what they hide; None if they are not two such masks.

    One may be broadcast to the other, as over heads. Or one is of keys alone: kernels that leave padding out take such
    a mask, and are told of the future in another way.
    """
    left, right = mask_of(ours), mask_of(theirs)
    found = None
    if _is_padding(ours.shape, left, theirs.shape, right):
        found = _padding_difference(ours, theirs, (left, right))
    if (found is None or found.differing) and _is_broadcast(ours.shape, left, theirs.shape, right):
        hidden = np.broadcast_arrays(_hidden(ours, left), _hidden(theirs, right))
        differing, elements = int(np.count_nonzero(hidden[0] != hidden[1])), hidden[0].size
        if found is None or not differing:
            passed, words = elements - int(np.count_nonzero(hidden[0])), (_BROADCAST, _BROADCAST)
            positions = blind_positions(hidden[0] & hidden[1])
            if left != right or ours.dtype != theirs.dtype:
                words = _names((left, right), ours.dtype, theirs.dtype)
            found = MaskDifference(differing, elements, passed, True, words=words, positions=positions)
    return found


def _padding_difference(ours: Array, theirs: Array, conventions: tuple[int, int]) -> MaskDifference:
    """Compare a mask of keys alone with one of queries and keys: by the keys that no query sees."""
    first = ours.ndim == 2
    keys, paired, convention = (ours, theirs, conventions[1]) if first else (theirs, ours, conventions[0])
    hidden = _hidden(paired, convention)
    padding, unseen = keys == 0, hidden.all(axis=tuple(range(1, paired.ndim - 1)))
    differing = int(np.count_nonzero(unseen != padding))
    positions = blind_positions(hidden)
    if positions is not None and paired.shape[-1] == paired.shape[-2]:
        positions = positions | padding
    names = "padding alone", "boolean" if str(paired.dtype) == "bool" else _WORDS[convention]
    words = names if first else names[::-1]
    passed = int(keys.size - np.count_nonzero(padding if first else unseen))
    return MaskDifference(differing, keys.size, passed, True, words=words, positions=positions)


def _is_padding(shape: tuple[int, ...], convention: int, other_shape: tuple[int, ...], other: int) -> bool:
    """Whether one of two masks is of keys alone, and the other of queries and keys."""
    if len(shape) > len(other_shape):
        shape, convention, other_shape, other = other_shape, other, shape, convention
    if len(shape) != 2 or len(other_shape) < 3 or convention != FLAGS or other == NONE:
        return False
    return shape[-1] == other_shape[-1] and other_shape[0] in (1, shape[0])


def _is_broadcast(shape: tuple[int, ...], convention: int, other_shape: tuple[int, ...], other: int) -> bool:
    """Whether two masks of queries and keys differ in axes of size one, or in leading axes, alone."""
    if NONE in (convention, other) or max(convention, other) == OPEN or min(len(shape), len(other_shape)) < 2:
        return False
    sizes = zip(reversed(shape), reversed(other_shape), strict=False)
    return all(ours == theirs or 1 in (ours, theirs) for ours, theirs in sizes)


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
        if _is_padding(*masks) or _is_broadcast(*masks):
            found.append(pair)
    return found


def _hidden(array: Array, convention: int) -> Array:
    hidden: Array = array == 0 if convention == FLAGS else array != 0
    return hidden


def _names(both: Sequence[int], *kinds: Any) -> tuple[str, str]:
    ours, theirs = ("boolean" if str(kind) == "bool" else _WORDS[one] for one, kind in zip(both, kinds, strict=True))
    return ours, theirs


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
            zeros, elements = int(side.zeros[row]), int(side.elements[row])
            hidden.append(zeros if code == FLAGS else elements - zeros)
            if side.has_sketch[row]:
                patterns.append(_pattern(side.sketches_at(np.array([row]), size)[0], code, side, row))
        names = _names(both, *(str(side.dtype[row]) for side, row in at))
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
        zeros, code = int(side.zeros[row]), int(codes[row])
        hidden = zeros if code == FLAGS else int(side.elements[row]) - zeros
        yield row, hidden, _sketch_of(side, row, code)


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


def without_edges(
    measured: Difference, ours: Array, theirs: Array, rtol: float | None, atol: float | None
) -> Difference:
    """Measure a pair again without the elements at the edge of the range or infinite, which would drown the others. If
    these are not the same elements on both sides, return `measured` unchanged."""
    again = difference(_as_infinite(ours), _as_infinite(theirs), rtol=rtol, atol=atol).difference
    return measured if again.max_abs == np.inf else replace(again, equal=measured.equal)


def _as_infinite(array: Array) -> Array:
    """Return the array with numbers at the edge of the dtype's range made infinite."""
    edge = dtypes.edge_of(dtypes.name_of(array.dtype))
    wide = array.astype(np.float64 if array.dtype == np.float64 else np.float32)
    wide[wide >= edge] = np.inf
    wide[wide <= -edge] = -np.inf
    return wide


def in_convention_of(own: Array, values: Array) -> Array:
    """Return a reference's mask `values` in the convention of the candidate's `own`; `own` itself if it means, or may
    mean, the same."""
    found = mask_difference(values, own)
    if found is None:
        return values
    if not found.differing or found.ambiguous:
        return own
    hidden = _hidden(values, mask_of(values))
    if mask_of(own) == FLAGS:
        return (~hidden).astype(own.dtype)
    low = own.min() if own.size and own.min() < 0 else dtypes.range_of(dtypes.name_of(own.dtype))[0]  # type: ignore[index]
    return np.where(hidden, low, 0).astype(own.dtype)
