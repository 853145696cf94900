"""Details of pairs, element by element: of a chosen few for a report, of any pair while two runs are open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.measure.measures import Measures
from tensortap.compare.measure.tensors import Tolerances
from tensortap.core import statistics
from tensortap.core.details import TOO_LARGE, Detail, TensorFacts, TileMap, Window
from tensortap.core.dtypes import numpy_dtype
from tensortap.core.records import Difference
from tensortap.errors import RunUnreadable, UsageError
from tensortap.kernels import summarize
from tensortap.kernels.pairs.details import Folded, inspect_pair, map_of
from tensortap.kernels.pairs.reference import tolerances
from tensortap.kernels.summary.reference import components

__all__ = ["PairDetails", "bounds_of", "choose_pairs", "facts_of", "folded_values", "unreadable_tensors"]

MOST_ELEMENTS = 1 << 26
"""Elements that all details of one report may have together, about five seconds of work; the first is free."""
_NEIGHBOURS = 6


class PairDetails:
    """Inspects pairs of two open runs. Each call reads the tensors that it needs, and releases them."""

    def __init__(
        self, reference: Side, candidate: Side, alignment: Alignment, measures: Measures, given: Tolerances
    ) -> None:
        self._sides = reference, candidate
        self._rows = alignment.reference, alignment.candidate
        self._named = list(zip(self._sides, self._rows, ("reference", "candidate"), strict=True))
        self._measures = measures
        self._given = given

    def detail(self, pair: int, most: int | None = None) -> Detail:
        """Return all about one pair. Its elements are inspected unless there are more than `most`."""
        left, right = (int(rows[pair]) for rows in self._rows)
        ours, theirs = (facts_of(side, row) for side, row in zip(self._sides, (left, right), strict=True))
        rtol, atol = tolerances(ours.dtype, theirs.dtype)
        rtol = rtol if self._given[0] is None else self._given[0]
        atol = atol if self._given[1] is None else self._given[1]
        difference = self._measures.difference(pair)
        found = Detail(
            rows=(pair,),
            whole=False,
            reference=ours,
            candidate=theirs,
            difference=difference,
            judged=None if difference is None else self._judged(difference, left),
            tolerances=(rtol, atol),
        )
        why = self.why_not(pair) or (TOO_LARGE if most is not None and ours.elements > most else "")
        if why:
            return replace(found, why=why)
        try:
            one, other = self.arrays(pair)
        except RunUnreadable as error:
            return replace(found, why=str(error), damaged=True)
        if self._sides[1].relaid[right]:  # the index has the numbers of the stored layout, or of its parts
            theirs = _facts_as_read(theirs.dtype, other)
        near = inspect_pair(one, other, bounds_of(ours, theirs), (rtol, atol))
        return replace(
            found,
            whole=True,
            candidate=theirs,
            histogram=near.histogram,
            ulps=near.ulps,
            map=near.map,
            worst=near.worst,
            needed=near.needed,
        )

    def _judged(self, difference: Difference, row: int) -> float:
        gain = Policy.row_gain(self._sides[0].row_length[row : row + 1])[0]
        return float(np.fmax(difference.rel_l2, difference.row_rel_l2 / gain))

    def map(self, pair: int, window: Window) -> TileMap:
        """Return the error map of a part of a pair."""
        reference, candidate = self.arrays(pair)
        return map_of(reference, candidate, window)

    def values(
        self, pair: int, window: Window, only: str | None = None
    ) -> tuple[tuple[int, int], Window, list[npt.NDArray[np.float64]]]:
        """Return the size of the folded tensors, the part of the window within, and the values of both sides or one."""
        parts = [folded_values(array, window) for array in self.arrays(pair, only)]
        return parts[0][0], parts[0][1], [values for _, _, values in parts]

    def arrays(self, pair: int, only: str | None = None) -> list[npt.NDArray[Any]]:
        if why := self.why_not(pair, only):
            raise UsageError(why)
        return [side.array(int(rows[pair])) for side, rows, name in self._named if only in (None, name)]

    def why_not(self, pair: int, only: str | None = None) -> str:
        """Return why the elements of a pair, or of one side, cannot be inspected; empty if they can."""
        for side, rows, name in self._named:
            if only in (None, name) and not side.kept[rows[pair]]:
                return f'only the summary of the {name}\'s tensor was kept: capture with keep="tensors"'
        if only is None and self._measures.reshaped[pair]:
            return "the shapes differ: elements have no counterparts"
        return ""

    def details(
        self, pairs: Sequence[int], most: int, progress: Callable[[int, int], None] | None = None
    ) -> Iterator[Detail]:
        """Yield the details of the first `most` pairs, in order. Pairs of the same two tensors count as one."""
        ids = [side.tensor_id[rows] for side, rows in zip(self._sides, self._rows, strict=True)]
        chosen: dict[tuple[int, int], int] = {}
        for pair in pairs:
            chosen.setdefault((int(ids[0][pair]), int(ids[1][pair])), pair)
            if len(chosen) == most:
                break
        left, done, sizes = MOST_ELEMENTS, 0, {pair: self._nbytes(pair) for pair in chosen.values()}
        for side, rows in zip(self._sides, self._rows, strict=True):
            own = np.array([int(rows[pair]) for pair in chosen.values()], np.int64)
            side.prefetch(own[side.kept[own]])
        for two, pair in chosen.items():
            found = self.detail(pair, left if done else None)
            left -= found.reference.elements if found.whole else 0
            yield replace(found, rows=tuple(np.flatnonzero((ids[0] == two[0]) & (ids[1] == two[1])).tolist()))
            done += sizes[pair]
            if progress is not None:
                progress(done, sum(sizes.values()))

    def _nbytes(self, pair: int) -> int:
        """Return the bytes of both tensors, at least 1: an empty pair is progress, too."""
        sides = [(side, int(rows[pair])) for side, rows in zip(self._sides, self._rows, strict=True)]
        return 1 + sum(int(side.elements[row]) * numpy_dtype(side.dtype[row]).itemsize for side, row in sides)


def unreadable_tensors(details: Sequence[Detail]) -> list[str]:
    """Return why tensors that should be there could not be read, each reason once."""
    return list(dict.fromkeys(detail.why for detail in details if detail.damaged))


def bounds_of(*sides: TensorFacts) -> tuple[float, float, float]:
    """Return the least and the greatest finite element of all sides, and the first side's root mean square."""
    ends = np.array([(side.min, side.max) for side in sides if side.min == side.min] or [(0.0, 0.0)])
    return float(ends[:, 0].min()), float(ends[:, 1].max()), sides[0].l2 / max(1, sides[0].elements) ** 0.5


def facts_of(side: Side, row: int) -> TensorFacts:
    """Return what the index of a run has about one record's tensor."""
    values = {each.name: each.typed(getattr(side, each.name)[row]) for each in statistics.stored()}
    return TensorFacts(**statistics.fields_of(values), dtype=side.dtype[row], shape=side.shape(row))


def _facts_as_read(dtype: str, array: npt.NDArray[Any]) -> TensorFacts:
    summary = summarize(array)
    values = {each.name: summary[each.name] for each in statistics.stored()}
    return TensorFacts(**statistics.fields_of(values), dtype=dtype, shape=array.shape)


def folded_values(array: npt.NDArray[Any], window: Window) -> tuple[tuple[int, int], Window, npt.NDArray[np.float64]]:
    """Return the size of the folded tensor, the part of the window within, and the elements in it."""
    values = components(array)
    folded = Folded.of(values.shape)
    part = folded.clipped(window)
    matrix = values.reshape(folded.rows, folded.columns)[part.top : part.bottom, part.left : part.right]
    return (folded.rows, folded.columns), part, matrix.astype(np.float64)


def choose_pairs(
    births: Sequence[int], error: npt.NDArray[np.float64], tolerance: npt.NDArray[np.float64], most: int
) -> list[int]:
    """Choose the pairs that readers most likely open: births, the neighbours of the first, pairs furthest beyond their
    tolerance, pairs with the largest error, and a sample of the rest. `error` is 0 where equal, NaN where unknown."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error > 0, error / tolerance, 0.0)
    first = births[0] if births else int(np.argmax(np.nan_to_num(ratio))) if len(error) else 0
    around = range(max(0, first - _NEIGHBOURS), min(len(error), first + _NEIGHBOURS))
    found = [*births[: most // 2], *sorted(around, key=lambda pair: abs(pair - first))]
    for values in (ratio, error):
        ranked = np.argsort(-np.nan_to_num(values, nan=0.0), kind="stable")[: most // 4]
        found += [pair for pair in ranked.tolist() if values[pair] > 0]
    differing = np.flatnonzero(~(error == 0))
    rest = differing if len(differing) else np.arange(len(error))
    found += rest[np.linspace(0, len(rest) - 1, min(most, len(rest))).astype(int)].tolist() if len(rest) else []
    return list(dict.fromkeys(found))
