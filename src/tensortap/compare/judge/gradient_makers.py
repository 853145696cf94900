"""The calls whose backward made each gradient of a step, as columns.

Rows are counted from the first one of the step, so that steps which repeat it share them. A call is identified by its
first row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tensortap.compare.judge.record_columns import RecordColumns
from tensortap.compare.judge.row_lists import Ints, RowLists, RowListsBuilder
from tensortap.compare.judge.steps.structure import StepStructure
from tensortap.core.records import GRADIENT_KINDS

__all__ = ["GradientMakers", "makers_of_step"]


@dataclass(frozen=True)
class GradientMakers:
    rows: Ints
    """The gradients of the step whose tensors were not seen before in it."""
    calls: RowLists
    """The calls that made each of them."""
    inner: RowLists
    """The other calls that made a gradient at an input or output: those inside the call, or that used the output."""

    @cached_property
    def all_calls(self) -> list[int]:
        found: list[int] = np.unique(self.calls.rows).tolist()
        return found

    def made_by(self, calls: Sequence[int], inner: Sequence[int]) -> Ints:
        """Return the gradients that one of some calls has made, or one of some calls inside or after another one."""
        found = np.zeros(len(self.rows), bool)
        for lists, wanted in ((self.calls, calls), (self.inner, inner)):
            if wanted:
                total = np.concatenate([[0], np.cumsum(np.isin(lists.rows, wanted))])
                found |= total[lists.begins[1:]] > total[lists.begins[:-1]]
        return self.rows[found]


def makers_of_step(step: StepStructure, columns: RecordColumns, begin: int, end: int) -> GradientMakers:
    rows: list[int] = []
    calls, inner = RowListsBuilder(begin), RowListsBuilder(begin)
    for row, (kind, first) in enumerate(
        zip(columns.kind[begin:end], columns.first_seen[begin:end], strict=True), begin
    ):
        if kind not in GRADIENT_KINDS or first < row:
            continue
        rows.append(row)
        call = step.calls.of_row(row) if kind in ("grad_input", "grad_output") else None
        if call is not None and kind == "grad_input" and not call.children:  # as `made_in` has it, for most records
            calls.add((call.first_row,))
            inner.add()
            continue
        made_in = [call.first_row for call in step.made_in(row)]
        calls.add(made_in)
        inner.add(() if call is None else [each for each in made_in if each != call.first_row])
    return GradientMakers(np.array(rows, np.int64) - begin, calls.build(), inner.build())
