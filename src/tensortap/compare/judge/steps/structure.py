"""The relations between the records of one step: its calls, its parameters, and the sources of each record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from tensortap.compare.judge.record_columns import RecordColumns
from tensortap.compare.judge.steps.calls import CallRows, StepCalls
from tensortap.compare.judge.steps.parameters import StepParameters
from tensortap.core.records import STATE_KINDS

__all__ = ["Sources", "StepStructure"]

_Module = tuple[tuple[int, int, int], str]
"""Rank, step and micro step, and the name of a module."""


class Sources(NamedTuple):
    """The rows that a row's value was computed from, as far as they were recorded."""

    rows: Sequence[int]
    sent: Sequence[int] = ()
    """The gradients that users of an output send back. If they are much less than the output's gradient, the code
    around uses the output as well, and then `around` are sources, too."""
    around: Sequence[int] = ()

    def map(self, move: Callable[[int], int]) -> Sources:
        return Sources(*(tuple(map(move, rows)) for rows in self))


class StepStructure:
    """The records `begin` to `end`, usually of one rank and step. `before` and `is_last`: see `StepParameters`."""

    def __init__(
        self,
        columns: RecordColumns,
        begin: int,
        end: int,
        before: tuple[int, int] | None = None,
        is_last: bool = True,
    ) -> None:
        self._columns = columns
        self.calls = StepCalls(columns, begin, end)
        self.parameters = StepParameters(columns, begin, end, self.calls, before, is_last)
        self._in_backward: dict[int, list[int]] = {}
        """By the first row of a call."""
        self._users_of_own: dict[_Module, list[CallRows]] = {}
        self._behind_parameters: dict[_Module, list[int]] = {}

    def sources(self, row: int) -> Sources:
        """Return the rows that a row's value was computed from."""
        kind = self._columns.kind[row]
        if kind == "param_grad":
            own = self._columns.scope[row], self._columns.module[row]
            if own not in self._behind_parameters:
                self._behind_parameters[own] = self._backward_of_parameter(row)
            return Sources(self._behind_parameters[own])
        if kind in STATE_KINDS:
            return Sources(self._sources_of_state(row, kind))
        call = self.calls.of_row(row)
        if call is None:
            return Sources(())
        if kind == "input":
            return Sources(self._before_in(call.parent, self._columns.seq[row]))
        if kind == "output":
            returned = [r for child in call.children for r in child.of("output")]
            return Sources(call.of("input") + returned + self._parameters(call))
        if kind == "grad_input":
            return Sources(self._in_backward_of(call))
        return self._behind(row, call)

    def _sources_of_state(self, row: int, kind: str) -> list[int]:
        columns = self._columns
        module, path = columns.module[row], columns.path[row]
        rank, step, _ = columns.scope[row]
        if kind == "buffer":
            before = self.parameters.state.get((rank, step, module, kind, path, 0 if columns.number[row] else -1))
            calls = self.calls.in_step.get((rank, step, module), []) if columns.number[row] else []
            given = [r for call in calls for r in call.of("input")]
            given += [r for call in calls for child in call.children for r in child.of("output")]
            return given + ([before] if before is not None else self._a_step_before(row))
        if kind == "param":
            if not columns.number[row]:
                return self._a_step_before(row)
            before = self.parameters.before_step((rank, step, module, kind, path))
            parameter = (rank, step, module, path)
            gradients = self.parameters.gradients.get(parameter, []) + self.parameters.step_gradients.get(parameter, [])
            return gradients + ([before] if before is not None else [])
        return self.parameters.gradients.get((rank, step, module, path.partition("~")[0]), [])

    def _parameters(self, call: CallRows) -> list[int]:
        """Return the rows of the parameters and buffers that a call used."""
        if not self.parameters.of_module:
            return []
        return self.parameters.of_module.get((*call.scope[:2], call.module), [])

    def made_in(self, row: int) -> list[CallRows]:
        """Return the calls whose backward made a gradient."""
        kind, call = self._columns.kind[row], self.calls.of_row(row)
        if kind == "param_grad":
            return self.users_of_own(row)
        if call is None or kind not in ("grad_input", "grad_output"):
            return []
        if kind == "grad_output":
            if users := self.calls.users(row, call):
                return users
            call = self.calls.outermost(row, call).parent
        return [] if call is None else [call, *call.children]

    def users_of_own(self, row: int) -> list[CallRows]:
        """Return the calls that used a module's own parameters: its own calls. A module that only holds weights, like
        the `out_proj` of an attention, is never called; then those of the container that is."""
        name, scope = self._columns.module[row], self._columns.scope[row]
        own = scope, name
        if own not in self._users_of_own:
            while not (calls := self.calls.of_module.get((scope, name), [])) and name:
                name = name.rpartition(".")[0]
            self._users_of_own[own] = calls
        return self._users_of_own[own]

    def held_inside(self, call: CallRows) -> list[int]:
        """Return the rows of parameters and their gradients of modules inside a call that are never called."""
        own = [row for row in self._parameters(call) if self._columns.module[row] != call.module]
        return own + self._held_gradients.get((call.scope, call.module), [])

    @property
    def has_uncalled(self) -> bool:
        """Whether some module that is never called has gradients of its parameters."""
        return bool(self._held_gradients)

    @cached_property
    def _held_gradients(self) -> dict[_Module, list[int]]:
        """Gradients of the parameters of modules that are never called, by scope and the module that uses them."""
        found: dict[_Module, list[int]] = defaultdict(list)
        for (scope, module), rows in self.parameters.own_gradients.items():
            if (scope, module) not in self.calls.of_module:
                for name in {call.module for call in self.users_of_own(rows[0])}:
                    found[scope, name] += rows
        return found

    def _backward_of_parameter(self, row: int) -> list[int]:
        """Return the rows that the gradient of a parameter is made from.

        The code of a module that calls others may use it before or after them. A module that is never called lends
        its parameter to any that are inside the one around it. Code that uses several matrices one after the other
        makes the gradient of each from the others.
        """
        calls = self.users_of_own(row)
        if len(calls) == 1 and not calls[0].children and not self.parameters.of_module:
            return calls[0].of("grad_output", "input")
        inside = [child for call in calls for child in call.children]
        if calls and calls[0].module != self._columns.module[row]:
            for call in inside:  # and those inside, as the list grows
                inside += call.children
        own = [r for call in calls for r in call.of("grad_output", "input")]
        owners = {(*call.scope[:2], call.module): None for call in calls}
        for owner in owners:
            weights = [r for r in self.parameters.of_module.get(owner, []) if self._is_weight(r)]
            own += weights if len(weights) > 1 else []
        return own + [r for call in inside for r in call.of("grad_output", "grad_input")]

    def _is_weight(self, row: int) -> bool:
        return self._columns.kind[row] == "param" and "bias" not in self._columns.path[row]

    def _a_step_before(self, row: int) -> list[int]:
        columns = self._columns
        rank, step, _ = columns.scope[row]
        module, kind, path = columns.module[row], columns.kind[row], columns.path[row]
        before = self.parameters.state_row((rank, step - 1, module, kind, path, 1))
        return [] if before is None else [before]

    def _before_in(self, call: CallRows | None, seq: int) -> list[int]:
        """Return what the code of a call could use at a moment: its inputs, and what its children had returned."""
        if call is None:
            return []
        returned = [r for child in call.children for r in child.of("output") if self._columns.seq[r] < seq]
        return call.of("input") + returned + self._parameters(call)

    def _backward_of(self, call: CallRows) -> list[int]:
        """Return the rows that the backward of a call used."""
        return call.of("grad_output", "input", "output") + self._parameters(call)

    def _in_backward_of(self, call: CallRows) -> list[int]:
        """Return the rows that the backward of a call used, and the gradients that its children made."""
        if call.first_row not in self._in_backward:
            inside = [r for child in call.children for r in child.of("grad_output", "grad_input")]
            self._in_backward[call.first_row] = self._backward_of(call) + inside
        return self._in_backward[call.first_row]

    def _behind(self, row: int, call: CallRows) -> Sources:
        """Return the sources of a gradient at a call's output: those of the backward of its users."""
        users = self.calls.users(row, call)
        found = [r for user in users for r in self._in_backward_of(user)]
        outermost = self.calls.outermost(row, call)
        if outermost.parent is None:  # the root's own: the loss made it from the root's output
            around = outermost.of("output")
        else:
            around = self._in_backward_of(outermost.parent)
        for user in users:  # the code that gave it to a user inside may use it as well, as for a residual
            if user.parent is not None and user.parent is not outermost.parent:
                around = around + self._in_backward_of(user.parent)
        if len(call.of("output")) > 1:  # its own code may use one of them for another
            around = around + self._parameters(call)
        if not any(user.of("grad_output", "grad_input") for user in users):
            return Sources(found + around)  # there are none, or no gradient comes by way of them
        sent = self._sent_back(row, call, users)
        return Sources([*found, *sent], sent, around)

    def _sent_back(self, row: int, call: CallRows, users: Iterable[CallRows]) -> list[int]:
        """Return the gradients that the users of an output send back to it."""
        path, tensor, tensors = self._columns.path, self._columns.tensor, self.calls.returned(row, call)
        given = [(user, path[r]) for user in users for r in user.of("input") if tensor[r] in tensors]
        return [r for user, name in given for r in user.of("grad_input") if path[r].partition("~")[0] == name]
