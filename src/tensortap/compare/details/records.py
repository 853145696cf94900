"""Details of single records of an open run, element by element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Side
from tensortap.compare.details.pairs import MOST_ELEMENTS, bounds_of, facts_of, folded_values
from tensortap.core.details import TOO_LARGE, Detail, Window
from tensortap.errors import RunUnreadable, UsageError
from tensortap.kernels.pairs.details import histogram_of

__all__ = ["RecordDetails"]

Floats = npt.NDArray[np.float64]


class RecordDetails:
    """Inspects single records of an open run."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def detail(self, row: int, most: int | None = None) -> Detail:
        facts = facts_of(self._side, row)
        found = Detail(rows=(row,), whole=False, reference=facts)
        why = self.why_not(row) or (TOO_LARGE if most is not None and facts.elements > most else "")
        if why:
            return replace(found, why=why)
        try:
            array = self._side.array(row)
        except RunUnreadable as error:
            return replace(found, why=str(error), damaged=True)
        return replace(found, whole=True, histogram=histogram_of(array, bounds_of(facts)))

    def values(self, row: int, window: Window, only: str | None = None) -> tuple[tuple[int, int], Window, list[Floats]]:
        """Return the size of the folded tensor, the part of the window within, and the values in it."""
        if why := self.why_not(row, only):
            raise UsageError(why)
        whole, part, values = folded_values(self._side.array(row), window)
        return whole, part, [values]

    def why_not(self, row: int, only: str | None = None) -> str:
        """Return why a record's elements cannot be inspected; empty if they can."""
        if only == "candidate":
            return "a single run has no candidate"
        return "" if self._side.kept[row] else 'only the summary of this tensor was kept: capture with keep="tensors"'

    def details(self, first: Sequence[int], most: int) -> Iterator[Detail]:
        """Yield the details of these rows, and of a sample of the others."""
        sample = np.linspace(0, len(self._side) - 1, min(most, len(self._side))).astype(int).tolist()
        left = MOST_ELEMENTS
        for at, row in enumerate(list(dict.fromkeys([*first[: most // 2], *sample]))[:most]):
            found = self.detail(row, left if at else None)
            left -= found.reference.elements if found.whole else 0
            yield found
