"""Pairs that are judged together: some steps, or a part of one, and what is known about them in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Ints
from tensortap.compare.judge.pairs import Floats, Pairs
from tensortap.compare.judge.row_lists import RowLists
from tensortap.compare.judge.rules.names import ROUNDING
from tensortap.compare.judge.rules.summed_columns import ListedRows
from tensortap.compare.judge.steps.facts import StepFacts, SummedFacts

__all__ = ["ALONE", "COPIED", "RIGHT", "UNLESS_WRONG", "Chunk", "StepPart"]

ALONE, UNLESS_WRONG, RIGHT, COPIED = range(4)
"""How a pair is judged: one by one; one by one, unless a source is wrong; right, unless a source is wrong; as the first
record of the same tensor."""


@dataclass(frozen=True)
class StepPart:
    """Some open pairs of one step, and their facts."""

    rows: Ints
    number: int
    """The number of the step."""
    begin: int
    """The first row of the step."""
    facts: StepFacts
    sources: Ints
    counts: Ints
    flags: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, rows: Ints, number: int, begin: int, facts: StepFacts) -> StepPart:
        own = rows - begin
        sources, counts = facts.sources.at(own)
        return cls(rows, number, begin, facts, sources + begin, counts, facts.flags[own])


@dataclass
class Chunk:
    """Open pairs, in order, and what was worked out about them in columns."""

    parts: Sequence[StepPart]
    rows: Ints
    sources: Ints
    """The sources of all pairs, one pair after the other."""
    counts: Ints
    flags: npt.NDArray[np.uint8]
    ways: npt.NDArray[np.uint8]
    allowed: Floats
    recorded: Floats
    rules: npt.NDArray[np.int16]
    """Numbers in `names`."""
    substitutes: Ints
    """The row that stands in for unrecorded sources; -1 if none does. Outputs from the first pair of the chunk on count
    as right there."""
    worst_right: Floats
    """The worst error of right gradients of matrices before each pair, if all in the chunk are right; NaN if the
    tolerance does not depend on it."""
    needs_gradients: npt.NDArray[np.bool_]
    """Whether the tolerance holds only if no gradient of a parameter in the chunk is wrong."""
    names: list[str] = field(default_factory=lambda: [ROUNDING])

    @classmethod
    def of(cls, parts: Sequence[StepPart], pairs: Pairs) -> Chunk:
        rows, sources, counts, flags = (
            np.concatenate(columns)
            for columns in zip(*((p.rows, p.sources, p.counts, p.flags) for p in parts), strict=True)
        )
        count = len(rows)
        return cls(
            *(parts, rows, sources, counts, flags, np.full(count, UNLESS_WRONG, np.uint8)),
            *(pairs.base[rows], pairs.base[rows], np.zeros(count, np.int16)),
            *(np.full(count, -1), np.full(count, np.nan), np.zeros(count, bool)),
        )

    @cached_property
    def ends(self) -> Ints:
        return np.cumsum(self.counts)

    @cached_property
    def assumes(self) -> npt.NDArray[np.bool_]:
        """Whether tolerances assume that pairs are right which are no sources."""
        return np.asarray((self.substitutes >= 0) | ~np.isnan(self.worst_right) | self.needs_gradients)

    # The columns as lists, whose single elements are read.
    @cached_property
    def row_list(self) -> list[int]:
        return self.rows.tolist()  # type: ignore[no-any-return]

    @cached_property
    def way_list(self) -> list[int]:
        return self.ways.tolist()  # type: ignore[no-any-return]

    @cached_property
    def source_list(self) -> list[int]:
        return self.sources.tolist()  # type: ignore[no-any-return]

    @cached_property
    def end_list(self) -> list[int]:
        return self.ends.tolist()  # type: ignore[no-any-return]

    def any_source(self, of_sources: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return for each pair whether something is so for any of its sources."""
        total = np.concatenate([[0], np.cumsum(of_sources)])
        return np.asarray(total[self.ends] > total[self.ends - self.counts])

    def summed(self, chosen: npt.NDArray[np.bool_]) -> tuple[ListedRows, ListedRows, ListedRows]:
        """Return what `SummedFacts` has about some pairs: own gradients, inputs, outputs. All of them must have it."""
        found: list[list[ListedRows]] = [[], [], []]
        offset = 0
        for part in self.parts:
            here = chosen[offset : offset + len(part.rows)]
            offset += len(part.rows)
            for listed, lists in zip(found, _lists_of(part.facts.summed), strict=True):
                places = np.searchsorted(part.facts.summed.rows, part.rows[here] - part.begin)
                rows, counts = lists.at(places)
                listed.append((rows + part.begin, counts))
        own, inputs, outputs = (
            (np.concatenate([rows for rows, _ in listed]), np.concatenate([counts for _, counts in listed]))
            for listed in found
        )
        return own, inputs, outputs


def _lists_of(facts: SummedFacts) -> tuple[RowLists, RowLists, RowLists]:
    return facts.own, facts.inputs, facts.outputs
