"""The relations between the records of a run: their calls, the nesting of calls, and their sources.

None of this is stored. It follows from names, execution order and the numbers of tensors. A call spans its records. A
module's parent is the nearest module above it whose call spans it too. Records with the same tensor number are of the
same tensor.

Only state reaches from one step to another: `steps.structure` works out the relations within one step, and few steps
are kept. Most steps repeat the one before, record by record. Their sources are those of the step before, moved by its
length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np

from tensortap.compare.align.side import Ints, Side
from tensortap.compare.judge.gradient_makers import GradientMakers, makers_of_step
from tensortap.compare.judge.record_columns import RecordColumns
from tensortap.compare.judge.steps.calls import CallRows, Spot
from tensortap.compare.judge.steps.facts import StepFacts, facts_of_step
from tensortap.compare.judge.steps.patterns import ByPattern, digest_of_records
from tensortap.compare.judge.steps.structure import Sources, StepStructure
from tensortap.compare.judge.steps.tables import ByStep

__all__ = ["Structure"]

_KeyT = TypeVar("_KeyT")
_ValueT = TypeVar("_ValueT")
_STEPS_KEPT = 4
"""Steps whose calls are kept; records are judged in order, and state of the step before belongs to a step."""


class Structure(RecordColumns):
    """The pairs by call. Rows are numbers of pairs."""

    def __init__(
        self, side: Side, rows: Ints, renamed: Mapping[tuple[str, int], tuple[str, int]] | None = None
    ) -> None:
        super().__init__(side, rows, renamed)
        self._kept: OrderedDict[int, StepStructure] = OrderedDict()
        self._patterns: ByPattern[dict[int, Sources]] = ByPattern()
        self._pattern_of: tuple[int, dict[int, Sources]] = -1, {}
        self._facts: ByPattern[StepFacts] = ByPattern()
        self._signature_of: tuple[int, Hashable] = -1, None
        self._makers: ByPattern[GradientMakers] = ByPattern()

    def release(self) -> None:
        """Release what was worked out. It is worked out again if it is asked for."""
        for name in list(vars(self)):
            if isinstance(getattr(type(self), name, None), cached_property):
                del vars(self)[name]
        for kept in (self._kept, self._patterns, self._facts, self._makers):
            kept.clear()
        self._pattern_of, self._signature_of = (-1, {}), (-1, None)

    # --- steps ------------------------------------------------------------------------------------------------------
    @cached_property
    def _begins(self) -> list[int]:
        """First rows of the steps of each rank; all rows are one step if those of a step are not together, or if steps
        share tensors."""
        if not len(self._rows):
            return []
        rank, step = self._at(self._side.rank), self._at(self._side.step)
        changes = np.ones(len(self._rows), bool)
        changes[1:] = (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])
        begins = np.flatnonzero(changes)
        places = set(zip(rank[begins].tolist(), step[begins].tolist(), strict=True))
        of_step = np.repeat(begins, np.diff(begins, append=len(self._rows)))
        if len(places) < len(begins) or (self._first_seen < of_step).any():
            return [0]
        found: list[int] = begins.tolist()
        return found

    @cached_property
    def _ends(self) -> list[int]:
        return [*self._begins[1:], len(self._rows)]

    @cached_property
    def _places(self) -> dict[tuple[int, int], int]:
        """Numbers of the steps in `_begins`, by rank and step."""
        rank, step = self._at(self._side.rank), self._at(self._side.step)
        return {(int(rank[begin]), int(step[begin])): number for number, begin in enumerate(self._begins)}

    def _step(self, number: int) -> StepStructure:
        """Return a step's structure; that of the step before belongs to it."""
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        begin, end = self._begins[number], self._ends[number]
        before, is_last = None, True
        if len(self._begins) > 1:
            rank, step, _ = self.scope[begin]
            earlier = self._places.get((rank, step - 1))
            before = None if earlier is None else (self._begins[earlier], self._ends[earlier])
            is_last = (rank, step + 1) not in self._places
        found = self._kept[number] = StepStructure(self, begin, end, before, is_last)
        while len(self._kept) > _STEPS_KEPT:
            self._kept.popitem(last=False)
        return found

    def _step_of_row(self, row: int) -> StepStructure:
        return self._step(bisect_right(self._begins, row) - 1)

    def _steps(self) -> Iterator[StepStructure]:
        return map(self._step, range(len(self._begins)))

    def _step_at(self, rank: int, step: int) -> StepStructure | None:
        if len(self._begins) == 1:
            return self._step(0)
        number = self._places.get((rank, step))
        return None if number is None else self._step(number)

    def _by_step(
        self,
        step_of: Callable[[_KeyT], StepStructure | None],
        table_of: Callable[[StepStructure], Mapping[_KeyT, _ValueT]],
    ) -> ByStep[_KeyT, _ValueT]:
        return ByStep(self._steps, self._step_at, step_of, table_of)

    def _step_of_tensor(self, tensor: int) -> StepStructure | None:
        ids, first = self._tensors
        place = int(np.searchsorted(ids, tensor))
        return self._step_of_row(int(first[place])) if place < len(ids) and ids[place] == tensor else None

    @cached_property
    def _tensors(self) -> tuple[Ints, Ints]:
        """Numbers of all tensors, in order, and the first row of each."""
        first = np.flatnonzero(self._first_seen == np.arange(len(self._rows)))
        ids = self._side.tensor_id[self._rows[first]]
        order = np.argsort(ids)
        return ids[order], first[order]

    @cached_property
    def calls(self) -> ByStep[Spot, CallRows]:
        return self._by_step(lambda spot: self._step_at(*spot[0][:2]), lambda step: step.calls.by_spot)

    @cached_property
    def consumers(self) -> ByStep[int, list[CallRows]]:
        """Calls by the number of a tensor that they were given."""
        return self._by_step(self._step_of_tensor, lambda step: step.calls.consumers)

    @cached_property
    def makers(self) -> ByStep[int, list[tuple[CallRows, int]]]:
        """Calls that returned a tensor, by its number, with the row; the innermost first."""
        return self._by_step(self._step_of_tensor, lambda step: step.calls.makers)

    @cached_property
    def calls_of_module(self) -> ByStep[tuple[tuple[int, int, int], str], list[CallRows]]:
        """By scope and module."""
        return self._by_step(lambda key: self._step_at(*key[0][:2]), lambda step: step.calls.of_module)

    @cached_property
    def calls_in_step(self) -> ByStep[tuple[int, int, str], list[CallRows]]:
        """By rank, step and module."""
        return self._by_step(lambda key: self._step_at(*key[:2]), lambda step: step.calls.in_step)

    @cached_property
    def state(self) -> ByStep[tuple[int, int, str, str, str, int], int]:
        """Row of a parameter or buffer by (rank, step, module, kind, path, call)."""
        return self._by_step(lambda key: self._step_at(*key[:2]), lambda step: step.parameters.state)

    @cached_property
    def parameters_of(self) -> ByStep[tuple[int, int, str], list[int]]:
        """Rows of the parameters and buffers that a module has before a step, by (rank, step, module)."""
        return self._by_step(lambda key: self._step_at(*key[:2]), lambda step: step.parameters.of_module)

    @cached_property
    def gradients_of(self) -> ByStep[tuple[int, int, str, str], list[int]]:
        """Rows of a parameter's gradients by (rank, step, module, path), over all micro steps."""
        return self._by_step(lambda key: self._step_at(*key[:2]), lambda step: step.parameters.gradients)

    @cached_property
    def step_gradients_of(self) -> ByStep[tuple[int, int, str, str], list[int]]:
        """Rows of the gradients that the optimizer used, by (rank, step, module, path)."""
        return self._by_step(lambda key: self._step_at(*key[:2]), lambda step: step.parameters.step_gradients)

    @cached_property
    def own_gradients(self) -> ByStep[tuple[tuple[int, int, int], str], list[int]]:
        """Rows of the gradients of a module's own parameters, by scope and module."""
        return self._by_step(lambda key: self._step_at(*key[0][:2]), lambda step: step.parameters.own_gradients)

    # --- one record -------------------------------------------------------------------------------------------------
    def spot_of(self, row: int) -> Spot:
        """Return the call of a record that is not of state."""
        return self.scope[row], self.module[row], self.number[row]

    def call_of(self, row: int) -> CallRows | None:
        return self._step_of_row(row).calls.of_row(row)

    def before_step(self, spot: tuple[int, int, str, str, str]) -> int | None:
        """Return the row of a parameter or buffer before a step, by (rank, step, module, kind, path)."""
        step = self._step_at(*spot[:2])
        return None if step is None else step.parameters.before_step(spot)

    def made_in(self, row: int) -> list[CallRows]:
        """Return the calls whose backward made a gradient."""
        return self._step_of_row(row).made_in(row)

    def users_of_own(self, row: int) -> list[CallRows]:
        """Return the calls that used a module's own parameters."""
        return self._step_of_row(row).users_of_own(row)

    def held_inside(self, call: CallRows) -> list[int]:
        """Return the rows of parameters and their gradients of modules inside a call that are never called."""
        step = self._step_at(*call.scope[:2])
        return [] if step is None else step.held_inside(call)

    def returned(self, row: int, call: CallRows) -> set[int]:
        """Return the numbers of the tensors whose gradient a row is."""
        return self._step_of_row(row).calls.returned(row, call)

    def outermost(self, row: int, call: CallRows) -> CallRows:
        """Return the outermost call around that returns the very same tensor: its gradient is this one."""
        return self._step_of_row(row).calls.outermost(row, call)

    def innermost(self, row: int, call: CallRows) -> CallRows:
        """Return the innermost call inside that returns the very same tensor: its gradient is this one."""
        return self._step_of_row(row).calls.innermost(row, call)

    def passes_through(self, call: CallRows) -> bool:
        """Whether a call returns an input unchanged: its users count as that input's users."""
        step = self._step_at(*call.scope[:2])
        return step is not None and step.calls.passes_through(call)

    def at_root(self, row: int) -> int | None:
        """Return the row of the root's own output gradient, if this row is the very same tensor; else None."""
        return self._step_of_row(row).calls.at_root(row)

    def users(self, row: int, call: CallRows) -> list[CallRows]:
        """Return the calls that were given the output whose gradient this row is; only the innermost of nested ones."""
        return self._step_of_row(row).calls.users(row, call)

    # --- sources of a record ----------------------------------------------------------------------------------------
    def sources(self, row: int) -> list[int]:
        """Return the rows that a row's value was computed from, as far as they were recorded."""
        number = bisect_right(self._begins, row) - 1
        begin = self._begins[number]
        known = self._pattern(number)
        moved = known.get(row - begin)
        if moved is None:
            moved = known[row - begin] = self._step(number).sources(row).map(lambda source: source - begin)
        found = [begin + source for source in moved.rows]
        if moved.sent and self.is_used_around(row, [begin + source for source in moved.sent]):
            found += [begin + source for source in moved.around]
        return found

    def is_used_around(self, row: int, sent: Sequence[int]) -> bool:
        """Whether a gradient is so much larger than those which users of the output sent back that others did, too."""
        size = self._side.l2
        return 2 * sum(float(size[self._rows[each]]) for each in sent) < float(size[self._rows[row]])

    def by_step(self, rows: Ints) -> Iterator[tuple[int, Ints]]:
        """Yield the number of each step that has some of these rows, and which."""
        bounds = np.searchsorted(rows, [*self._begins, len(self._rows)])
        for number, (begin, end) in enumerate(pairwise(bounds.tolist())):
            if begin < end:
                yield number, rows[begin:end]

    @property
    def is_one_step(self) -> bool:
        """Whether the records of all steps are kept as those of one, because they are not apart."""
        return len(self._begins) == 1

    @property
    def has_facts(self) -> bool:
        """Whether there are facts of steps. There are none if calls are renamed: columns have the names as recorded."""
        return not self._renamed

    def facts(self, number: int) -> tuple[int, StepFacts]:
        """Return the first row of a step, and its facts, relative to that row."""
        begin, end = self._begins[number], self._ends[number]
        found = self._facts.get(self._signature(number), lambda: facts_of_step(self._step(number), self, begin, end))
        return begin, found

    def gradient_makers(self, number: int) -> GradientMakers:
        """Return the calls that made the gradients of a step; rows are counted from the first of the step."""
        begin, end = self._begins[number], self._ends[number]
        return self._makers.get(self._signature(number), lambda: makers_of_step(self._step(number), self, begin, end))

    def _pattern(self, number: int) -> dict[int, Sources]:
        """Return the sources of a step's rows that are known, relative to its first: of all steps that are alike."""
        if self._pattern_of[0] != number:
            self._pattern_of = number, self._patterns.get(self._signature(number), dict[int, Sources])
        return self._pattern_of[1]

    def _signature(self, number: int) -> Hashable:
        """Return what the sources of a step follow from: its records, and those of the step before if it has state."""
        if self._signature_of[0] != number:
            self._signature_of = number, self._find_signature(number)
        return self._signature_of[1]

    def _find_signature(self, number: int) -> Hashable:
        rank, step, _ = self.scope[self._begins[number]]
        earlier = self._places.get((rank, step - 1)) if len(self._begins) > 1 else None
        if not self.has_state or earlier is None:
            return self._records_of(number)
        return self._begins[number] - self._begins[earlier], self._records_of(earlier), self._records_of(number)

    def _records_of(self, number: int) -> bytes:
        begin, end = self._begins[number], self._ends[number]
        return digest_of_records(self._side, self._rows[begin:end], self._first_seen[begin:end] - begin)
