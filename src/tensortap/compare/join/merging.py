"""Statistics and sketches of whole tensors from those of their parts, rank by rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.join.layout import Layout
from tensortap.compare.join.pieces import Ints, Pieces, indexes
from tensortap.core.sketches import FULL, fold
from tensortap.store import Run
from tensortap.store.run import reading

__all__ = ["member_sketches", "merged_sketches", "merged_statistics"]

_COUNTS = ("elements", "nan", "posinf", "neginf", "zeros", "edge")
_UNKNOWN_OF_SUMS = ("min", "max", "std", "l1", "l2")
"""Statistics of a sum that do not follow from those of its summands."""

Floats = npt.NDArray[np.float64]


class _Whole:
    """The statistics of whole tensors, as their parts come in."""

    def __init__(self, count: int) -> None:
        self.counts = {name: np.zeros(count, np.int64) for name in _COUNTS}
        self.low, self.high = np.full(count, np.nan), np.full(count, np.nan)
        self.ordinary = np.zeros(count, np.int64)
        self.mean, self.m2 = np.zeros(count), np.zeros(count)
        self.l1, self.squares = np.zeros(count), np.zeros(count)
        self.digest = np.zeros(count, np.uint64)

    def add(self, at: Ints, own: dict[str, npt.NDArray[Any]], again: npt.NDArray[np.bool_]) -> None:
        """Add one part to each of the wholes `at`. A part of a second summand counts no new elements."""
        for name in _COUNTS:
            counted = name in ("nan", "posinf", "neginf")
            self.counts[name][at] += own[name] if counted else np.where(again, 0, own[name])
        self.low[at], self.high[at] = np.fmin(self.low[at], own["min"]), np.fmax(self.high[at], own["max"])
        self.l1[at] += own["l1"]
        self.squares[at] += own["l2"] ** 2
        self.digest[at] += own["digest"]
        ordinary = own["elements"] - own["nan"] - own["posinf"] - own["neginf"] - own["edge"]
        having = ordinary > 0
        at, n = at[having], ordinary[having]
        apart, total = own["mean"][having] - self.mean[at], self.ordinary[at] + n
        self.m2[at] += own["std"][having] ** 2 * n + apart**2 * (self.ordinary[at] / total * n)
        self.mean[at] += apart * (n / total)
        self.ordinary[at] = total

    def columns(self) -> dict[str, Any]:
        none = self.ordinary == 0
        constant = (self.low == self.high) & (self.counts["edge"] == 0)
        mean = np.where(constant, self.low, self.mean)
        std = np.sqrt(np.where(constant, 0.0, self.m2) / np.maximum(self.ordinary, 1))
        return {
            **self.counts,
            "min": self.low,
            "max": self.high,
            "mean": np.where(none, np.nan, mean),
            "std": np.where(none, np.nan, std),
            "l1": self.l1,
            "l2": np.sqrt(self.squares),
            "digest": self.digest,
        }


def merged_statistics(run: Run, layout: Layout, groups: Ints) -> dict[str, Any]:
    """Return the columns that depend on values: statistics, class, call, and where the first part's bytes are."""
    count = len(groups)
    row_of = np.full(len(layout), -1, np.int64)
    row_of[groups] = np.arange(count)
    whole = _Whole(count)
    sums = np.array([plan.is_sum for plan in layout.plans], bool)[layout.plan[groups]] if count else np.zeros(0, bool)
    means = np.zeros(count)
    texts: dict[str, list[Any]] = {name: [None] * count for name in ("cls", "file", "offset")}
    calls = np.zeros(count, np.int64)
    parts = _by_rank(layout, row_of)
    with np.errstate(all="ignore"):
        for place, (_, index) in enumerate(indexes(run, layout.pieces.ranks)):
            own = parts[place]
            if not len(own.rows):
                continue
            table = index.columns.take(own.rows)
            numbers = {
                name: table.column(name).to_numpy() for name in (*_COUNTS, "min", "max", "mean", "std", "l1", "l2")
            }
            numbers["digest"] = table.column("digest").to_numpy()
            whole.add(own.at, numbers, own.term > 0)
            weights = np.array([plan.weight for plan in layout.plans])[layout.plan[groups[own.at]]]
            means[own.at] += weights * numbers["mean"]
            first = own.first
            calls[own.at[first]] = table.column("call").to_numpy()[first]
            for name, values in texts.items():
                column = table.column(name).take(np.flatnonzero(first)).to_pylist()
                for at, value in zip(own.at[first].tolist(), column, strict=True):
                    values[at] = value
    columns = whole.columns()
    columns["mean"][sums] = means[sums]
    columns["zeros"][sums] = 0
    for name in _UNKNOWN_OF_SUMS:
        columns[name][sums] = np.nan
    return {**columns, **texts, "call": calls}


def merged_sketches(run: Run, layout: Layout, groups: Ints, wanted: npt.NDArray[np.bool_]) -> Floats:
    """Return the sketch of each wanted group, as rows of a matrix; NaN where there is none."""
    row_of = np.full(len(layout), -1, np.int64)
    row_of[groups[wanted]] = np.flatnonzero(wanted)
    weights = np.array([plan.weight for plan in layout.plans])
    found, seen = np.zeros((len(groups), FULL)), np.zeros(len(groups), bool)
    lacking = ~wanted
    parts = _by_rank(layout, row_of)
    for place, (_, index) in enumerate(indexes(run, layout.pieces.ranks)):
        own = parts[place]
        if not len(own.rows):
            continue
        with reading(run.path):
            matrix, which = index.sketches()
        which = which[own.rows]
        lacking[own.at[which < 0]] = True
        if not matrix.size:
            continue
        if matrix.shape[1] < found.shape[1]:
            found = _fold(found, matrix.shape[1])
        having = which >= 0
        with np.errstate(over="ignore", invalid="ignore"):
            own_sketches = fold(matrix, found.shape[1])[which[having]].astype(np.float64)
            found[own.at[having]] += own_sketches * weights[layout.plan[groups[own.at[having]]]][:, None]
        seen[own.at[having]] = True
    found[lacking | ~seen] = np.nan
    return found


def member_sketches(run: Run, pieces: Pieces, rows: Ints) -> Floats:
    """Return the sketches of single rows of `Pieces`, as rows of a matrix; NaN where there is none."""
    found = np.full((len(rows), FULL), np.nan)
    wanted = set(pieces.place[rows].tolist())
    for place, (_, index) in enumerate(indexes(run, pieces.ranks)):
        if place not in wanted:
            continue
        own = np.flatnonzero(pieces.place[rows] == place)
        with reading(run.path):
            matrix, which = index.sketches()
        which = which[pieces.row[rows[own]]]
        if not matrix.size:
            continue
        if matrix.shape[1] < found.shape[1]:
            found = _fold(found, matrix.shape[1])
        found[own[which >= 0]] = fold(matrix, found.shape[1])[which[which >= 0]]
    return found


def _fold(matrix: Floats, size: int) -> Floats:
    """Return sketches in float64 with fewer sums."""
    found: Floats = matrix.reshape(len(matrix), size, -1).sum(axis=2)
    return found


class _RankParts:
    """The chosen rows of one rank: rows of its index, and the wholes that they are parts of."""

    def __init__(self, rows: Ints, at: Ints, term: Ints, first: npt.NDArray[np.bool_]) -> None:
        self.rows, self.at, self.term, self.first = rows, at, term, first


def _by_rank(layout: Layout, row_of: Ints) -> list[_RankParts]:
    pieces = layout.pieces
    wanted = np.flatnonzero(row_of[layout.group] >= 0)
    wanted = wanted[np.argsort(pieces.place[layout.chosen[wanted]], kind="stable")]
    chosen = layout.chosen[wanted]
    cuts = np.searchsorted(pieces.place[chosen], np.arange(len(pieces.ranks) + 1))
    groups = layout.group[wanted]
    is_first = layout.first[groups] == chosen
    found = []
    for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        part = slice(begin, end)
        found.append(
            _RankParts(pieces.row[chosen[part]], row_of[groups[part]], layout.term[wanted[part]], is_first[part])
        )
    return found
