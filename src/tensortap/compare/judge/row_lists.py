"""Lists of rows as columns: for each of many records, the rows that belong to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RowLists", "RowListsBuilder", "largest"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowLists:
    """The rows of all lists, one list after the other."""

    begins: Ints
    """For each list, and one more: where it begins in `rows`."""
    rows: npt.NDArray[np.int32]

    def at(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the rows of some lists, one after the other, and how many rows each has."""
        starts = self.begins[places]
        counts = self.begins[places + 1] - starts
        chosen = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        return self.rows[chosen].astype(np.int64), counts


class RowListsBuilder:
    """Collects lists of rows, which it counts from `begin`."""

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._rows: list[int] = []
        self._ends = [0]

    def add(self, rows: Iterable[int] = ()) -> None:
        self._rows.extend(rows)
        self._ends.append(len(self._rows))

    def build(self) -> RowLists:
        rows = np.array(self._rows, np.int64) - self._begin
        return RowLists(np.array(self._ends, np.int64), rows.astype(np.int32))


def largest(values: npt.NDArray[np.float64], counts: Ints, of_empty: float = 0.0) -> npt.NDArray[np.float64]:
    """Return the largest value of each list; `of_empty` for an empty one. `counts` are the lengths of the lists."""
    found = np.full(len(counts), of_empty)
    some = counts > 0
    if some.any():
        begins = (np.cumsum(counts) - counts)[some]
        found[some] = np.maximum.reduceat(values, begins)
    return found
