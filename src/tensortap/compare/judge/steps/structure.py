"""The relations between the records of one step of one rank: their calls, the nesting of calls, and their sources."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, Protocol
from weakref import ref

from tensortap.core.records import STATE_KINDS

_FORWARD = ("input", "output")

__all__ = ["CallRows", "RecordColumns", "Sources", "Spot", "StepStructure"]

_Module = tuple[tuple[int, int, int], str]
"""Rank, step and micro step, and the name of a module."""
Spot = tuple[tuple[int, int, int], str, int]
"""Identifies a call: (rank, step, micro step), module, number."""


class CallRows:
    """One call of one module: its rows by kind, in execution order.

    A call holds its children, and they refer to it weakly: so a step is freed when it is no longer used, and no garbage
    collector has to find that out.
    """

    __slots__ = ("__weakref__", "_around", "begin", "children", "end", "first_row", "module", "number", "rows", "scope")

    def __init__(self, module: str, scope: tuple[int, int, int], number: int, begin: int, first_row: int) -> None:
        self.module = module
        self.scope = scope
        """Rank, step, micro step."""
        self.number = number
        self.begin, self.end = begin, -1
        """Positions in execution order."""
        self.first_row = first_row
        self.rows: dict[str, list[int]] = {}
        self.children: list[CallRows] = []
        self._around: ref[CallRows] | None = None

    @property
    def parent(self) -> CallRows | None:
        """The call that this one ran inside."""
        if self._around is None:
            return None
        found = self._around()
        if found is None:
            raise RuntimeError(f"The step of a call of {self.module!r} is no longer held: look the call up again.")
        return found

    def put_into(self, parent: CallRows) -> None:
        self._around = ref(parent)
        parent.children.append(self)

    def of(self, *kinds: str) -> list[int]:
        return [row for kind in kinds for row in self.rows.get(kind, ())]

    @property
    def spot(self) -> Spot:
        return self.scope, self.module, self.number


class RecordColumns(Protocol):
    """The columns of each record that its structure depends on, by row."""

    @property
    def tensor(self) -> Sequence[int]: ...
    @property
    def kind(self) -> Sequence[str]: ...
    @property
    def module(self) -> Sequence[str]: ...
    @property
    def path(self) -> Sequence[str]: ...
    @property
    def scope(self) -> Sequence[tuple[int, int, int]]: ...
    @property
    def number(self) -> Sequence[int]: ...
    @property
    def seq(self) -> Sequence[int]: ...
    @property
    def first_seen(self) -> Sequence[int]: ...


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
    """The records `begin` to `end` by call, usually of one rank and step.

    before: the step before. is_last: no record of the step after exists.
    """

    def __init__(
        self, columns: RecordColumns, begin: int, end: int, before: StepStructure | None = None, is_last: bool = True
    ) -> None:
        self._columns = columns
        self._begin, self._end = begin, end
        self._before = before
        self._is_last = is_last
        self._call_of: list[CallRows | None] = []
        self._in_backward: dict[int, list[int]] = {}
        """By the first row of a call."""
        self._users: dict[int, list[CallRows]] = {}
        self._users_of_own: dict[_Module, list[CallRows]] = {}
        self._behind_parameters: dict[_Module, list[int]] = {}

    @cached_property
    def calls(self) -> dict[Spot, CallRows]:
        found: dict[Spot, CallRows] = {}
        columns, rows = self._columns, slice(self._begin, self._end)
        self._call_of = [None] * (self._end - self._begin)
        values = zip(
            *(column[rows] for column in (columns.kind, columns.scope, columns.module, columns.number, columns.seq)),
            strict=True,
        )
        call_of, in_scope, last = self._call_of, {}, None
        calls: dict[tuple[int, int, int], dict[tuple[str, int], CallRows]] = {}
        for place, (kind, scope, module, number, seq) in enumerate(values):
            if kind in STATE_KINDS:
                continue
            if scope is not last:  # hardly ever: hashing it for each row takes long
                in_scope, last = calls.setdefault(scope, {}), scope
            call = in_scope.get((module, number))
            if call is None:
                call = in_scope[module, number] = CallRows(module, scope, number, seq, self._begin + place)
                found[scope, module, number] = call
            rows_of_kind = call.rows.get(kind)
            if rows_of_kind is None:
                call.rows[kind] = [self._begin + place]
            else:
                rows_of_kind.append(self._begin + place)
            call_of[place] = call
            if seq > call.end and kind in _FORWARD:
                call.end = seq
        self._nest(found.values())
        return found

    def _nest(self, calls: Iterable[CallRows]) -> None:
        by_place: dict[tuple[tuple[int, int, int], str], list[CallRows]] = {}
        for call in calls:
            place = call.scope, call.module
            if place in by_place:
                by_place[place].append(call)
            else:
                by_place[place] = [call]
        around_of: dict[str, str] = {}
        for call in calls:
            name = call.module
            while name:
                above = around_of.get(name)
                if above is None:
                    above = around_of[name] = name.rpartition(".")[0]
                name = above
                outer = by_place.get((call.scope, name))
                if outer is None:
                    continue
                # Calls of one module do not overlap: the first that ends later contains this one, unless it begins
                # later, as where code around calls a part of a module first. Only inputs show when a call begins.
                around = [
                    c
                    for c in outer
                    if c.end >= call.end and c is not call and (c.begin <= call.begin or "input" not in c.rows)
                ]
                if around:
                    call.put_into(around[0] if len(around) == 1 else min(around, key=attrgetter("end")))
                    break

    def call_of(self, row: int) -> CallRows | None:
        return self._call_of[row - self._begin] if self.calls else None

    @cached_property
    def consumers(self) -> dict[int, list[CallRows]]:
        """Calls by the number of a tensor that they were given."""
        found: dict[int, list[CallRows]] = defaultdict(list)
        tensor = self._columns.tensor
        for call in self.calls.values():
            for row in call.rows.get("input", ()):
                found[tensor[row]].append(call)
        return found

    @cached_property
    def makers(self) -> dict[int, list[tuple[CallRows, int]]]:
        """Calls that returned a tensor, by its number, with the row; the innermost first."""
        found: dict[int, list[tuple[CallRows, int]]] = defaultdict(list)
        tensor, seq = self._columns.tensor, self._columns.seq
        for call in self.calls.values():
            for row in call.of("output"):
                found[tensor[row]].append((call, row))
        for makers in found.values():
            makers.sort(key=lambda maker: seq[maker[1]])
        return found

    @cached_property
    def calls_of_module(self) -> dict[tuple[tuple[int, int, int], str], list[CallRows]]:
        found: dict[tuple[tuple[int, int, int], str], list[CallRows]] = defaultdict(list)
        for call in self.calls.values():
            found[call.scope, call.module].append(call)
        return found

    @cached_property
    def calls_in_step(self) -> dict[tuple[int, int, str], list[CallRows]]:
        found: dict[tuple[int, int, str], list[CallRows]] = defaultdict(list)
        for call in self.calls.values():
            found[call.scope[0], call.scope[1], call.module].append(call)
        return found

    @cached_property
    def state(self) -> dict[tuple[int, int, str, str, str, int], int]:
        """Row of a parameter or buffer by (rank, step, module, kind, path, call)."""
        columns = self._columns
        found = {}
        for row, kind in enumerate(columns.kind[self._begin : self._end], self._begin):
            if kind == "param" or kind == "buffer":
                rank, step, _ = columns.scope[row]
                found[rank, step, columns.module[row], kind, columns.path[row], columns.number[row]] = row
        return found

    def _state_row(self, spot: tuple[int, int, str, str, str, int]) -> int | None:
        found = self.state.get(spot)
        return found if found is not None or self._before is None else self._before.state.get(spot)

    @cached_property
    def parameters_of(self) -> dict[tuple[int, int, str], list[int]]:
        """Rows of the parameters and buffers that a module has before a step, by (rank, step, module).

        These are its own, and those of modules inside that only hold them and are never called.
        """
        found: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        before = {} if self._before is None else self._before.state
        after_step = ((spot, row) for spot, row in before.items() if spot[-1])
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
        while module and (rank, step, module) not in self.calls_in_step:
            module = module.rpartition(".")[0]
        return module

    def before_step(self, spot: tuple[int, int, str, str, str]) -> int | None:
        """Return the row of a parameter or buffer before a step, by (rank, step, module, kind, path).

        Without one of its own, it is that after the step before: capture need not record both.
        """
        rank, step, *rest = spot
        module, kind, path = rest
        before = self.state.get((rank, step, module, kind, path, 0))
        return self._state_row((rank, step - 1, module, kind, path, 1)) if before is None else before

    @cached_property
    def gradients_of(self) -> dict[tuple[int, int, str, str], list[int]]:
        """Rows of a parameter's gradients by (rank, step, module, path), over all micro steps."""
        return self._by_parameter("param_grad")

    @cached_property
    def step_gradients_of(self) -> dict[tuple[int, int, str, str], list[int]]:
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

    # --- sources of a record ---------------------------------------------------------------------------------------
    def sources(self, row: int) -> Sources:
        kind = self._columns.kind[row]
        if kind == "param_grad":
            own = self._columns.scope[row], self._columns.module[row]
            if own not in self._behind_parameters:
                self._behind_parameters[own] = self._backward_of_parameter(row)
            return Sources(self._behind_parameters[own])
        if kind in STATE_KINDS:
            return Sources(self._sources_of_state(row, kind))
        call = self.call_of(row)
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
            before = self.state.get((rank, step, module, kind, path, 0 if columns.number[row] else -1))
            calls = self.calls_in_step.get((rank, step, module), []) if columns.number[row] else []
            given = [r for call in calls for r in call.of("input")]
            given += [r for call in calls for child in call.children for r in child.of("output")]
            return given + ([before] if before is not None else self._a_step_before(row))
        if kind == "param":
            if not columns.number[row]:
                return self._a_step_before(row)
            before = self.before_step((rank, step, module, kind, path))
            parameter = (rank, step, module, path)
            gradients = self.gradients_of.get(parameter, []) + self.step_gradients_of.get(parameter, [])
            return gradients + ([before] if before is not None else [])
        return self.gradients_of.get((rank, step, module, path.partition("~")[0]), [])

    def _parameters(self, call: CallRows) -> list[int]:
        """Return the rows of the parameters and buffers that a call used."""
        if not self.parameters_of:
            return []
        return self.parameters_of.get((*call.scope[:2], call.module), [])

    def made_in(self, row: int) -> list[CallRows]:
        """Return the calls whose backward made a gradient."""
        kind, call = self._columns.kind[row], self.call_of(row)
        if kind == "param_grad":
            return self.users_of_own(row)
        if call is None or kind not in ("grad_input", "grad_output"):
            return []
        if kind == "grad_output":
            if users := self.users(row, call):
                return users
            call = self.outermost(row, call).parent
        return [] if call is None else [call, *call.children]

    def users_of_own(self, row: int) -> list[CallRows]:
        """Return the calls that used a module's own parameters: its own calls. A module that only holds weights, like
        the `out_proj` of an attention, is never called; then those of the container that is."""
        name, scope = self._columns.module[row], self._columns.scope[row]
        own = scope, name
        if own not in self._users_of_own:
            while not (calls := self.calls_of_module.get((scope, name), [])) and name:
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
        for (scope, module), rows in self.own_gradients.items():
            if (scope, module) not in self.calls_of_module:
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
        if len(calls) == 1 and not calls[0].children and not self.parameters_of:
            return calls[0].of("grad_output", "input")
        inside = [child for call in calls for child in call.children]
        if calls and calls[0].module != self._columns.module[row]:
            for call in inside:  # and those inside, as the list grows
                inside += call.children
        own = [r for call in calls for r in call.of("grad_output", "input")]
        owners = {(*call.scope[:2], call.module): None for call in calls}
        for owner in owners:
            weights = [r for r in self.parameters_of.get(owner, []) if self._is_weight(r)]
            own += weights if len(weights) > 1 else []
        return own + [r for call in inside for r in call.of("grad_output", "grad_input")]

    def _is_weight(self, row: int) -> bool:
        return self._columns.kind[row] == "param" and "bias" not in self._columns.path[row]

    def _a_step_before(self, row: int) -> list[int]:
        columns = self._columns
        rank, step, _ = columns.scope[row]
        before = self._state_row((rank, step - 1, columns.module[row], columns.kind[row], columns.path[row], 1))
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
        users = self.users(row, call)
        found = [r for user in users for r in self._in_backward_of(user)]
        outermost = self.outermost(row, call)
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
        path, tensor, tensors = self._columns.path, self._columns.tensor, self.returned(row, call)
        given = [(user, path[r]) for user in users for r in user.of("input") if tensor[r] in tensors]
        return [r for user, name in given for r in user.of("grad_input") if path[r].partition("~")[0] == name]

    def returned(self, row: int, call: CallRows) -> set[int]:
        """Return the numbers of the tensors whose gradient a row is."""
        columns = self._columns
        path = columns.path[row].partition("~")[0]
        return {columns.tensor[r] for r in call.rows.get("output", ()) if columns.path[r] == path}

    def outermost(self, row: int, call: CallRows) -> CallRows:
        """Return the outermost call around that returns the very same tensor: its gradient is this one."""
        tensor, tensors = self._columns.tensor, self.returned(row, call)
        while call.parent is not None and any(tensor[r] in tensors for r in call.parent.of("output")):
            call = call.parent
        return call

    def innermost(self, row: int, call: CallRows) -> CallRows:
        """Return the innermost call inside that returns the very same tensor: its gradient is this one."""
        tensor, tensors = self._columns.tensor, self.returned(row, call)
        inner: CallRows | None = call
        while inner is not None:
            call = inner
            inner = next((each for each in call.children if any(tensor[r] in tensors for r in each.of("output"))), None)
        return call

    def passes_through(self, call: CallRows) -> bool:
        """Whether a call returns an input unchanged: its users count as that input's users."""
        tensor = self._columns.tensor
        given = [tensor[row] for row in call.rows.get("input", ())]
        return any(tensor[row] in given for row in call.rows.get("output", ()))

    def at_root(self, row: int) -> int | None:
        """Return the row of the root's own output gradient, if this row is the very same tensor; else None."""
        tensor = self._columns.tensor
        roots = self.calls_of_module.get((self._columns.scope[row], ""), [])
        same = [r for root in roots for r in root.of("grad_output") if tensor[r] == tensor[row]]
        return same[0] if same else None

    def users(self, row: int, call: CallRows) -> list[CallRows]:
        """Return the calls that were given the output whose gradient this row is; only the innermost of nested ones."""
        if call is not self.call_of(row):
            return self._find_users(row, self.calls.get(call.spot, call))
        if row not in self._users:
            self._users[row] = self._find_users(row, call)
        return self._users[row]

    def _find_users(self, row: int, call: CallRows) -> list[CallRows]:
        found = [user for tensor in self.returned(row, call) for user in self.consumers.get(tensor, ())]
        found = [
            user for user in found if user is not call and not _inside(call, user) and not self.passes_through(user)
        ]
        outer = [user.parent for user in found if user.parent is not None]
        return [user for user in found if not any(user is each for each in outer)]


def _inside(call: CallRows, other: CallRows) -> bool:
    """Whether a call ran inside another."""
    around = call.parent
    while around is not None:
        if around is other:
            return True
        around = around.parent
    return False
