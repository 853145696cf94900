"""The judgement of a comparison: what each pair is called, and which wrong ones are births."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.pairs import Floats
from tensortap.compare.judge.steps.calls import Spot
from tensortap.compare.measure.choices import ChangedChoice
from tensortap.compare.measure.kinks import CrossedKink
from tensortap.core.records import STATUSES

__all__ = ["Judgement"]


@dataclass(frozen=True)
class Judgement:
    """For every pair: status, tolerance and rule; and for the wrong ones whether they are births."""

    status: list[str]
    tolerance: Floats
    row_tolerance: Floats
    rule: list[str]
    born: list[int]
    """Rows, in execution order."""
    sources_error: dict[int, float]
    """For each born row, the worst error among its sources; NaN if none was recorded."""
    affected_calls: set[Spot]
    """Calls without a gradient at an output whose own gradients are wrong."""
    kinks: Mapping[int, CrossedKink] = field(default_factory=dict)
    """Rows that are right but for few elements that crossed a kink."""
    choices: Mapping[int, ChangedChoice] = field(default_factory=dict)
    """Rows of choices that differ, as rounding may have decided."""
    cancelling: frozenset[int] = frozenset()
    """Rows of gradients that are close and consist of rounding alone: sums that cancel out."""

    unsupported: frozenset[int] = frozenset()
    """Rows that are close only because more was allowed for something that was not recorded."""

    @cached_property
    def _codes(self) -> npt.NDArray[np.int8]:
        """The status of each pair as its number in STATUSES."""
        numbers = {status: number for number, status in enumerate(STATUSES)}
        return np.fromiter(map(numbers.__getitem__, self.status), np.int8, len(self.status))

    def having(self, *statuses: str) -> npt.NDArray[np.bool_]:
        """Return for each pair whether it has one of these statuses."""
        return np.array([status in statuses for status in STATUSES])[self._codes]

    @cached_property
    def unjudged(self) -> list[int]:
        """Rows that could not be judged."""
        found: list[int] = np.flatnonzero(self.having("unjudged")).tolist()
        return found

    @property
    def counts(self) -> Counter[str]:
        """Pairs by status, of those that occur, in the order of their first pair."""
        found, first, times = np.unique(self._codes, return_index=True, return_counts=True)
        order = np.argsort(first).tolist()
        return Counter({STATUSES[found[at]]: int(times[at]) for at in order})
