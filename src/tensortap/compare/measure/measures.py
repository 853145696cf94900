"""The difference of each pair: by digest if the tensors are equal, else from all elements, else from sketches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.measure.hidden import UNREAD_POSITIONS
from tensortap.compare.measure.masks import MaskDifference
from tensortap.core.records import Difference
from tensortap.kernels.pairs.reference import PairMeasure
from tensortap.kernels.pairs.sketches import sketch_differences
from tensortap.kernels.summary.visible import SUMS

__all__ = ["OTHER_LAYOUT", "Measures", "estimate", "prepare"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# With k buckets the estimate of a distance has a relative standard error of 1/sqrt(2*k); with 256 it was measured
# within 9.6 % for 95 % of the cases. Sketches are stored as float32, which bounds the resolution of a distance.
_ERROR_BAR = 0.1
_ERROR_BAR_OF = 256
_AT_ONCE = 2048
"""Pairs whose sketches are read at once, few enough to stay in the cache."""
_ROUNDING = 2.0**-23

OTHER_LAYOUT = "only norms and counts: another layout"
_OVERFLOW = "only norms and counts: its sketch overflowed"
_NO_SKETCH = "only norms and counts: it has no sketch"
_UNPLACED = "a summary does not show where its NaN and Inf are"
_LARGE = 2.0**20
"""Norm beyond which a sketch, stored in float32, may not show where single elements are infinite."""


@dataclass
class Measures:
    """Columns over all pairs, in the reference's order; NaN where unknown."""

    equal: Bools
    reshaped: Bools
    exact: Bools
    rel_l2: Floats
    rel_l2_bar: Floats
    cosine: Floats
    l2_difference: Floats
    row_rel_l2: Floats
    """rel_l2 of the worst row; known only where all elements were measured."""
    sides: dict[str, dict[str, Any]]
    """Per side ("reference", "candidate"): elements, nan, inf, posinf, mean, std, l2."""
    differences: dict[int, Difference] = field(default_factory=dict)
    """Measurements on all elements, by pair."""
    limits: dict[int, str] = field(default_factory=dict)
    """Pairs whose summaries do not suffice to call them right, and why. Their rel_l2 is a lower bound, or NaN."""
    masks: dict[int, MaskDifference] = field(default_factory=dict)
    """Pairs of masks that were compared by what they hide."""

    shown: set[int] = field(default_factory=set)
    """Pairs that were measured without the positions that a mask hides."""
    in_other_order: set[int] = field(default_factory=set)
    """The pairs of `shown` that may be lists of tokens in another order than positions have."""
    reordered: set[int] = field(default_factory=set)
    """Pairs of a check that have the same tokens in another order, and were not replaced."""
    withdrawn: set[int] = field(default_factory=set)
    """Pairs that are not of the same elements, so that nothing is known of their difference."""

    @property
    def open(self) -> npt.NDArray[np.int64]:
        """Pairs that are not known to be equal by their digests."""
        found = np.flatnonzero(~self.equal & ~self.reshaped)
        return np.setdiff1d(found, list(self.withdrawn)) if self.withdrawn else found

    @property
    def nonfinite(self) -> Bools:
        """Pairs where one side has other numbers of NaN or Inf than the other, or has them in other places."""
        ours, theirs = self.sides["reference"], self.sides["candidate"]
        found: Bools = np.zeros(len(self.equal), bool)
        edges = (ours["edge"] > 0) | (theirs["edge"] > 0)
        found |= ours["nan"] != theirs["nan"]
        for name in ("inf", "posinf"):
            found |= ~edges & (ours[name] != theirs[name])
        # One side's -inf may be the other's lowest number: masks have either.
        found |= edges & (ours["inf"] + ours["edge"] != theirs["inf"] + theirs["edge"])
        found[[pair for pair, difference in self.differences.items() if _misplaced(difference)]] = True
        found[list(self.masks)] = False
        found[list(self.withdrawn)] = False
        return found

    def take(self, pair: int, measure: PairMeasure) -> None:
        """Store a measurement on all elements of a pair."""
        found = measure.difference
        self.differences[pair] = found
        self.exact[pair] = True
        self.equal[pair] = found.equal
        self.rel_l2[pair], self.rel_l2_bar[pair] = found.rel_l2, 0.0
        self.cosine[pair], self.l2_difference[pair] = found.cosine, found.l2
        self.row_rel_l2[pair] = found.row_rel_l2
        for name, side in (("reference", measure.reference), ("candidate", measure.candidate)):
            for column in ("nan", "inf", "posinf", "mean", "std", "l2"):
                self.writable(name, column)[pair] = getattr(side, column)

    def writable(self, side: str, name: str) -> npt.NDArray[Any]:
        """Return a column of a side that may be changed; until then, it is the index's own."""
        columns = self.sides[side]
        if not columns[name].flags.writeable:
            columns[name] = columns[name].copy()
        found: npt.NDArray[Any] = columns[name]
        return found

    def take_mask(self, pair: int, found: MaskDifference) -> None:
        """Store the difference of two masks."""
        self.masks[pair] = found
        self.reshaped[pair] = False  # they hide the same in two shapes, or not
        self.exact[pair] = found.exact
        self.rel_l2_bar[pair] = 0.0 if found.exact else 0.1 * found.error
        self.replace(pair, found.as_difference())

    def take_shown(self, pair: int, measure: PairMeasure, explained: bool) -> None:
        """Store a measurement without positions that a mask hides. `explained`: these are what makes the pair differ,
        so that it is not known to be right."""
        self.take(pair, measure)
        self.shown.add(pair)
        if explained:
            self.limits[pair] = UNREAD_POSITIONS

    def take_shown_estimate(self, pair: int, rel_l2: float, explained: bool) -> None:
        """Store the same as an estimate from sketches."""
        self.rel_l2[pair], self.rel_l2_bar[pair] = rel_l2, _ERROR_BAR * (_ERROR_BAR_OF / SUMS) ** 0.5 * rel_l2
        self.l2_difference[pair] = rel_l2 * float(self.sides["reference"]["l2"][pair])
        self.cosine[pair] = np.nan
        self.shown.add(pair)
        if explained:
            self.limits[pair] = UNREAD_POSITIONS

    def replace(self, pair: int, found: Difference) -> None:
        """Replace the difference of a pair; the numbers of each side stay."""
        self.differences[pair] = found
        self.rel_l2[pair], self.row_rel_l2[pair] = found.rel_l2, found.row_rel_l2
        self.cosine[pair], self.l2_difference[pair] = found.cosine, found.l2

    def difference(self, pair: int) -> Difference | None:
        if pair in self.differences:
            return self.differences[pair]
        if np.isnan(self.rel_l2[pair]):
            return None
        apart = 0.0 if self.equal[pair] else float("nan")  # only whole tensors give these, unless they are equal
        return Difference(
            elements=int(self.sides["reference"]["elements"][pair]),
            equal=bool(self.equal[pair]),
            exact=bool(self.exact[pair]),
            rel_l2=float(self.rel_l2[pair]),
            rel_l2_bar=float(self.rel_l2_bar[pair]),
            cosine=float(self.cosine[pair]),
            l2=float(self.l2_difference[pair]),
            max_abs=apart,
            max_ulp=apart,
            mismatched=apart,
            row_rel_l2=apart,
        )


def prepare(reference: Side, candidate: Side, alignment: Alignment) -> Measures:
    """Return what the indexes alone have: which pairs are equal, and both sides' own numbers."""
    left, right = alignment.reference, alignment.candidate
    same_dtype = np.array(_same_words(reference.dtype.words, candidate.dtype.words))
    if len(left):
        same_dtype = same_dtype[reference.dtype.codes[left], candidate.dtype.codes[right]]
    reshaped = reference.shape_hash[left] != candidate.shape_hash[right]
    equal = (reference.digest[left] == candidate.digest[right]) & same_dtype & ~reshaped if len(left) else reshaped
    equal &= ~(candidate.reordered[right] | reference.reordered[left])
    zeros = np.where(equal, 0.0, np.nan)
    return Measures(
        equal=equal,
        reshaped=reshaped,
        exact=equal.copy(),
        rel_l2=zeros.copy(),
        rel_l2_bar=zeros.copy(),
        cosine=np.where(equal, 1.0, np.nan),
        l2_difference=zeros.copy(),
        row_rel_l2=zeros.copy(),
        sides={
            name: _numbers(side, rows, take)
            for name, side, rows, take in (
                ("reference", reference, left, alignment.of_reference),
                ("candidate", candidate, right, alignment.of_candidate),
            )
        },
    )


def estimate(
    measures: Measures, reference: Side, candidate: Side, alignment: Alignment, pairs: npt.NDArray[Any]
) -> None:
    """Estimate pairs from their sketches, for tensors that were not stored on both sides."""
    reordered = candidate.reordered[alignment.candidate[pairs]] | reference.reordered[alignment.reference[pairs]]
    _bound(measures, pairs[reordered], OTHER_LAYOUT)
    pairs = pairs[~reordered]
    if not len(pairs):
        return
    left, right = alignment.reference[pairs], alignment.candidate[pairs]
    without = ~(reference.has_sketch[left] & candidate.has_sketch[right])
    buckets = min(reference.sketch_size, candidate.sketch_size)
    apart = np.full(len(pairs), np.nan)
    known = np.flatnonzero(~without)
    for begin in range(0, len(known), _AT_ONCE):
        some = known[begin : begin + _AT_ONCE]
        matrices = reference.sketches_at(left[some], buckets), candidate.sketches_at(right[some], buckets)
        places = np.arange(len(some))
        apart[some] = sketch_differences(matrices[0], places, matrices[1], places)
    for side in (reference, candidate):
        side.release_sketches()
    overflowed = ~np.isfinite(apart) & ~without
    _bound(measures, pairs[without], _NO_SKETCH)
    _bound(measures, pairs[overflowed], _OVERFLOW)
    known = np.isfinite(apart)
    error_bar = _ERROR_BAR * (_ERROR_BAR_OF / buckets) ** 0.5
    _from_distance(measures, pairs[known], apart[known], error_bar)
    _limit(measures, reference, candidate, alignment, pairs)


def _from_distance(measures: Measures, pairs: npt.NDArray[Any], apart: Floats, error_bar: float) -> None:
    """Set the numbers that follow from the distance of two sketches."""
    ours, theirs = (measures.sides[name]["l2"][pairs] for name in ("reference", "candidate"))
    with np.errstate(divide="ignore", invalid="ignore"):
        # The norms are exact, and the distance is at least their difference.
        apart = np.fmax(apart, np.abs(ours - theirs))  # the norm of a sum over ranks is not known
        relative = np.where(ours > 0, apart / ours, np.where(apart > 0, np.inf, 0.0))
        closeness = 1 - (apart**2 - (ours - theirs) ** 2) / (2 * ours * theirs)
    measures.rel_l2[pairs] = relative
    measures.rel_l2_bar[pairs] = error_bar * relative + _ROUNDING
    # Where the norms are far apart, the error of the distance is larger than all that the angle adds to it.
    meaningful = (np.maximum(ours, theirs) <= 4 * np.minimum(ours, theirs)) & (ours > 0)
    measures.cosine[pairs] = np.where(meaningful, np.clip(closeness, -1, 1), np.where(ours == theirs, 1.0, np.nan))
    measures.l2_difference[pairs] = apart


def _limit(measures: Measures, reference: Side, candidate: Side, alignment: Alignment, pairs: npt.NDArray[Any]) -> None:
    """Mark pairs whose summaries may hide a difference: NaN may have swapped places with zeros, which a sketch does not
    show, and infinite elements likewise beside large ones."""
    ours, theirs = measures.sides["reference"], measures.sides["candidate"]
    unplaced = (ours["nan"] + theirs["nan"])[pairs] > 0
    marked = (ours["inf"] + ours["edge"] + theirs["inf"] + theirs["edge"])[pairs] > 0
    unplaced |= marked & ~(np.maximum(ours["l2"], theirs["l2"])[pairs] < _LARGE)
    zeros = (reference.zeros[alignment.reference[pairs]] > 0) | (candidate.zeros[alignment.candidate[pairs]] > 0)
    unplaced = pairs[unplaced & zeros]
    measures.rel_l2_bar[unplaced] = np.inf
    measures.limits |= dict.fromkeys(unplaced.tolist(), _UNPLACED)


def _bound(measures: Measures, pairs: npt.NDArray[Any], why: str) -> None:
    """Set the lower bound of a difference that norms alone give."""
    if not len(pairs):
        return
    ours, theirs = (measures.sides[name]["l2"][pairs] for name in ("reference", "candidate"))
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(ours > 0, np.abs(ours - theirs) / ours, np.where(theirs > 0, np.inf, 0.0))
        measures.rel_l2[pairs] = np.where(np.isnan(ours + theirs), np.nan, relative)
        measures.l2_difference[pairs] = np.abs(ours - theirs)
    measures.rel_l2_bar[pairs] = np.inf
    measures.limits |= dict.fromkeys(pairs.tolist(), why)


def _numbers(
    side: Side, rows: npt.NDArray[np.int64], take: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
) -> dict[str, Any]:
    if not len(rows):
        return {name: np.empty(0) for name in ("elements", "nan", "inf", "posinf", "edge", "mean", "std", "l2")}
    return {
        "elements": take(side.elements),
        "nan": _counts(side.nan, rows),
        "inf": _counts(side.posinf, rows) + _counts(side.neginf, rows),
        "posinf": _counts(side.posinf, rows),
        "edge": _counts(side.edge, rows),
        "mean": take(side.mean),
        "std": take(side.std),
        "l2": take(side.l2),
    }


def _counts(column: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return counts of rows that usually are zero: zeros that nobody wrote take no memory."""
    return column[rows] if column.any() else np.zeros(len(rows), column.dtype)


def _misplaced(found: Difference) -> bool:
    return found.max_abs == np.inf and not np.isfinite([found.reference_value, found.candidate_value]).all()


def _same_words(left: Iterable[str], right: Iterable[str]) -> list[list[bool]]:
    right = list(right)
    return [[one == other for other in right] for one in left]
