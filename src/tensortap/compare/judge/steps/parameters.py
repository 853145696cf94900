"""The parameters and buffers of one step, and the gradients of parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from itertools import chain

from tensortap.compare.judge.record_columns import RecordColumns
from tensortap.compare.judge.steps.calls import StepCalls

__all__ = ["StepParameters"]

_State = tuple[int, int, str, str, str, int]
"""Identifies a parameter or buffer: rank, step, module, kind, path, call."""


class StepParameters:
    """The parameters, buffers and gradients among the records `begin` to `end`.

    before: first row of the step before, and the first row after that step; None if there is none.
    is_last: whether no record of the step after exists.
    """

    def __init__(
        self,
        columns: RecordColumns,
        begin: int,
        end: int,
        calls: StepCalls,
        before: tuple[int, int] | None = None,
        is_last: bool = True,
    ) -> None:
        self._columns = columns
        self._begin, self._end = begin, end
        self._calls = calls
        self._before = before
        self._is_last = is_last

    @cached_property
    def state(self) -> dict[_State, int]:
        """Rows of parameters and buffers."""
        return _state_rows(self._columns, self._begin, self._end)

    @cached_property
    def _state_before(self) -> Mapping[_State, int]:
        """The same of the step before."""
        return {} if self._before is None else _state_rows(self._columns, *self._before)

    def state_row(self, spot: _State) -> int | None:
        """Return the row of a parameter or buffer in this step or the one before."""
        found = self.state.get(spot)
        return found if found is not None else self._state_before.get(spot)

    @cached_property
    def of_module(self) -> dict[tuple[int, int, str], list[int]]:
        """Rows of the parameters and buffers that a module has before a step, by (rank, step, module).

        These are its own, and those of modules inside that only hold them and are never called.
        """
        found: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        after_step = ((spot, row) for spot, row in self._state_before.items() if spot[-1])
        own = ((spot, row) for spot, row in self.state.items() if self._is_last or not spot[-1])
        for (rank, step, module, kind, path, call), row in chain(after_step, own):
            if call and (rank, step + 1, module, kind, path, 0) in self.state:
                continue  # recorded twice
            step += bool(call)
            found[rank, step, module].append(row)
            if (reader := self._reader_of(rank, step, module)) != module:
                found[rank, step, reader].append(row)
        return found

    def _reader_of(self, rank: int, step: int, module: str) -> str:
        """Return the innermost module around that is called in a step: its code reads the parameters of the others."""
        while module and (rank, step, module) not in self._calls.in_step:
            module = module.rpartition(".")[0]
        return module

    def before_step(self, spot: tuple[int, int, str, str, str]) -> int | None:
        """Return the row of a parameter or buffer before a step, by (rank, step, module, kind, path).

        Without one of its own, it is that after the step before: capture need not record both.
        """
        rank, step, *rest = spot
        module, kind, path = rest
        before = self.state.get((rank, step, module, kind, path, 0))
        return self.state_row((rank, step - 1, module, kind, path, 1)) if before is None else before

    @cached_property
    def gradients(self) -> dict[tuple[int, int, str, str], list[int]]:
        """Rows of a parameter's gradients by (rank, step, module, path), over all micro steps."""
        return self._by_parameter("param_grad")

    @cached_property
    def step_gradients(self) -> dict[tuple[int, int, str, str], list[int]]:
        """Rows of the gradients that the optimizer used, by (rank, step, module, path)."""
        return self._by_parameter("step_grad")

    def _by_parameter(self, wanted: str) -> dict[tuple[int, int, str, str], list[int]]:
        found: dict[tuple[int, int, str, str], list[int]] = defaultdict(list)
        columns = self._columns
        for row, kind in enumerate(columns.kind[self._begin : self._end], self._begin):
            if kind == wanted:
                rank, step, _ = columns.scope[row]
                found[rank, step, columns.module[row], columns.path[row].partition("~")[0]].append(row)
        return found

    @cached_property
    def own_gradients(self) -> dict[tuple[tuple[int, int, int], str], list[int]]:
        """Rows of the gradients of a module's own parameters, by scope and module."""
        found: dict[tuple[tuple[int, int, int], str], list[int]] = defaultdict(list)
        columns = self._columns
        for row, kind in enumerate(columns.kind[self._begin : self._end], self._begin):
            if kind == "param_grad":
                found[columns.scope[row], columns.module[row]].append(row)
        return found

    def has_gradients_beside(self, scope: tuple[int, int, int], module: str) -> bool:
        """Whether parameters of other modules than one have gradients in a scope."""
        return bool(self._modules_with_gradients.get(scope, set()) - {module})

    @cached_property
    def _modules_with_gradients(self) -> dict[tuple[int, int, int], set[str]]:
        found: dict[tuple[int, int, int], set[str]] = defaultdict(set)
        for scope, module in self.own_gradients:
            found[scope].add(module)
        return found


def _state_rows(columns: RecordColumns, begin: int, end: int) -> dict[_State, int]:
    found = {}
    for row, kind in enumerate(columns.kind[begin:end], begin):
        if kind == "param" or kind == "buffer":
            rank, step, _ = columns.scope[row]
            found[rank, step, columns.module[row], kind, columns.path[row], columns.number[row]] = row
    return found
