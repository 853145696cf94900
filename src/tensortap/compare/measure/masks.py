"""Masks are compared by what they hide: the same pattern may be boolean, additive in any dtype, or numbers 0 and 1.

Here, masks are arrays; `mask_sketches` compares those of which only summaries are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.measure.edges import as_infinite
from tensortap.compare.measure.hidden import blind_positions
from tensortap.compare.measure.mask_conventions import FLAGS, NONE, OPEN, SUM, hidden_by, mask_of, word_of, words_of
from tensortap.core import dtypes
from tensortap.core.records import Difference, Summary
from tensortap.kernels.summary.visible import Positions, padding_of_texts

__all__ = [
    "MaskDifference",
    "equal_mask",
    "in_convention_of",
    "is_broadcast",
    "is_padding",
    "mask_difference",
    "padding_mask",
    "padding_positions",
    "reshaped_mask_difference",
]

Array = npt.NDArray[Any]
_BROADCAST = "broadcast"
_FACTOR = 1e-6
"""Relative difference up to which numbers are those of another mask times a factor."""


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


def mask_difference(ours: Array, theirs: Array) -> MaskDifference | None:
    """Compare two arrays by what they hide; None if they are not both masks, or numbers 0 and 1 on both sides."""
    left, right = mask_of(ours), mask_of(theirs)
    if NONE in (left, right) or max(left, right) == OPEN or left == right == FLAGS:
        return None
    if left + right == OPEN + FLAGS and all(dtypes.edge_of(dtypes.name_of(a.dtype)) < np.inf for a in (ours, theirs)):
        return None
    if left == right == SUM and not _may_be_sums(ours, theirs):
        return None
    hidden = hidden_by(ours, left), hidden_by(theirs, right)
    differing = int(np.count_nonzero(hidden[0] != hidden[1]))
    ambiguous = (left == FLAGS) != (right == FLAGS) and differing == ours.size > 0
    passed = int(ours.size - np.count_nonzero(hidden[0]))
    words, positions = words_of((left, right), ours.dtype, theirs.dtype), blind_positions(hidden[0] & hidden[1])
    return MaskDifference(differing, ours.size, passed, True, ambiguous, words, positions)


def _may_be_sums(ours: Array, theirs: Array) -> bool:
    """Whether two arrays of several low numbers are masks, and not other numbers: one reaches the edge of its dtype's
    range, or they are the same numbers times a factor."""
    wide = [as_infinite(each) for each in (ours, theirs)]
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
    if is_padding(ours.shape, left, theirs.shape, right):
        found = _padding_difference(ours, theirs, (left, right))
    if (found is None or found.differing) and is_broadcast(ours.shape, left, theirs.shape, right):
        hidden = np.broadcast_arrays(hidden_by(ours, left), hidden_by(theirs, right))
        differing, elements = int(np.count_nonzero(hidden[0] != hidden[1])), hidden[0].size
        if found is None or not differing:
            passed, words = elements - int(np.count_nonzero(hidden[0])), (_BROADCAST, _BROADCAST)
            positions = blind_positions(hidden[0] & hidden[1])
            if left != right or ours.dtype != theirs.dtype:
                words = words_of((left, right), ours.dtype, theirs.dtype)
            found = MaskDifference(differing, elements, passed, True, words=words, positions=positions)
    return found


def _padding_difference(ours: Array, theirs: Array, conventions: tuple[int, int]) -> MaskDifference:
    """Compare a mask of keys alone with one of queries and keys: by the keys that no query sees."""
    first = ours.ndim == 2
    keys, paired, convention = (ours, theirs, conventions[1]) if first else (theirs, ours, conventions[0])
    hidden = hidden_by(paired, convention)
    padding, unseen = keys == 0, hidden.all(axis=tuple(range(1, paired.ndim - 1)))
    differing = int(np.count_nonzero(unseen != padding))
    positions = blind_positions(hidden)
    if positions is not None and paired.shape[-1] == paired.shape[-2]:
        positions = positions | padding
    names = "padding alone", word_of(convention, paired.dtype)
    words = names if first else names[::-1]
    passed = int(keys.size - np.count_nonzero(padding if first else unseen))
    return MaskDifference(differing, keys.size, passed, True, words=words, positions=positions)


def is_padding(shape: tuple[int, ...], convention: int, other_shape: tuple[int, ...], other: int) -> bool:
    """Whether one of two masks is of keys alone, and the other of queries and keys."""
    if len(shape) > len(other_shape):
        shape, convention, other_shape, other = other_shape, other, shape, convention
    if len(shape) != 2 or len(other_shape) < 3 or convention != FLAGS or other == NONE:
        return False
    return shape[-1] == other_shape[-1] and other_shape[0] in (1, shape[0])


def is_broadcast(shape: tuple[int, ...], convention: int, other_shape: tuple[int, ...], other: int) -> bool:
    """Whether two masks of queries and keys differ in axes of size one, or in leading axes, alone."""
    if NONE in (convention, other) or max(convention, other) == OPEN or min(len(shape), len(other_shape)) < 2:
        return False
    sizes = zip(reversed(shape), reversed(other_shape), strict=False)
    return all(ours == theirs or 1 in (ours, theirs) for ours, theirs in sizes)


def equal_mask(array: Array, summary: Summary | None = None) -> MaskDifference | None:
    """Return how an array, which both sides have, frees positions as a mask; None if it does not."""
    kind = mask_of(array, summary) if array.ndim > 2 else NONE
    if kind in (NONE, OPEN) or (kind == FLAGS and array.dtype.kind != "b"):
        return None
    hidden = hidden_by(array, kind)
    positions = blind_positions(hidden)
    if positions is None or not positions.any() or (kind == FLAGS and not _lets_true_through(array, positions)):
        return None
    words, passed = words_of((kind, kind), array.dtype, array.dtype), int(array.size - np.count_nonzero(hidden))
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


def padding_mask(array: Array) -> MaskDifference | None:
    """Return how an array, which both sides have, frees the padding of texts, should attention hide everything from
    some of it; None if it has none."""
    if (positions := padding_of_texts(array)) is None:
        return None
    words = ("padding alone", "padding alone")
    return MaskDifference(0.0, array.size, int(np.count_nonzero(array)), True, words=words, positions=positions)


def padding_positions(array: Array) -> Positions | None:
    """Return the positions that a mask of 0 and 1 hides; None if it is another array. True may mean either."""
    return array == 0 if array.dtype.kind in "iuf" and np.isin(array, (0, 1)).all() else None


def in_convention_of(own: Array, values: Array) -> Array:
    """Return a reference's mask `values` in the convention of the candidate's `own`; `own` itself if it means, or may
    mean, the same."""
    found = mask_difference(values, own)
    if found is None:
        return values
    if not found.differing or found.ambiguous:
        return own
    hidden = hidden_by(values, mask_of(values))
    if mask_of(own) == FLAGS:
        return (~hidden).astype(own.dtype)
    low = own.min() if own.size and own.min() < 0 else dtypes.range_of(dtypes.name_of(own.dtype))[0]  # type: ignore[index]
    return np.where(hidden, low, 0).astype(own.dtype)
