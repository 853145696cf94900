"""The relations between the records of a run: their calls, the nesting of calls, and their sources.

None of this is stored. It follows from names, execution order and the numbers of tensors. A call spans its records. A
module's parent is the nearest module above it whose call spans it too. Records with the same tensor number are of the
same tensor.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Side
from tensortap.core.records import STATE_KINDS

__all__ = ["CallRows", "Spot", "Structure"]

Ints = npt.NDArray[np.int64]
Spot = tuple[tuple[int, int, int], str, int]
"""Identifies a call: (rank, step, micro step), module, number."""


@dataclass(slots=True, eq=False)
class CallRows:
    """One call of one module: its rows by kind, in execution order."""

    module: str
    scope: tuple[int, int, int]
    """Rank, step, micro step."""
    number: int
    begin: int
    end: int
    rows: dict[str, list[int]] = field(default_factory=dict)
    parent: CallRows | None = None
    children: list[CallRows] = field(default_factory=list)

    def of(self, *kinds: str) -> list[int]:
        return [row for kind in kinds for row in self.rows.get(kind, ())]

    @property
    def spot(self) -> Spot:
        return self.scope, self.module, self.number


class Structure:
    """The pairs by call. Rows here are numbers of pairs; `rows` are the reference's rows of these, in its order.

    renamed: calls whose outputs count as those of another call, because the candidate has both in one.
    """

    def __init__(
        self, side: Side, rows: Ints, renamed: Mapping[tuple[str, int], tuple[str, int]] | None = None
    ) -> None:
        self._side = side
        self._renamed = renamed or {}
        self._rows = rows
        self._call_of: list[CallRows | None] = []

    # Columns are built on first use: a comparison in which all is right needs none of them. Rules read single elements,
    # which lists and views return fastest; equal elements of a list are one object.
    @cached_property
    def tensor(self) -> Sequence[int]:
        return self._view(self._side.tensor_id[self._rows])

    @cached_property
    def kind(self) -> list[str]:
        return self._side.kind.at(self._rows)

    @cached_property
    def module(self) -> list[str]:
        if not self._renamed:
            return self._side.module.at(self._rows)
        return [module for module, _ in self._modules_and_calls]

    @cached_property
    def _modules_and_calls(self) -> list[tuple[str, int]]:
        """Modules and numbers of calls, with those that count as another call."""
        found = zip(self._side.module.at(self._rows), self._side.call[self._rows].tolist(), strict=True)
        kinds = zip(found, self.kind, strict=True)
        return [self._renamed.get(call, call) if kind in ("output", "grad_output") else call for call, kind in kinds]

    @cached_property
    def path(self) -> list[str]:
        return self._side.path.at(self._rows)

    @cached_property
    def scope(self) -> list[tuple[int, int, int]]:
        """Rank, step and micro step; see `Side.pass_number`."""
        columns = [column[self._rows] for column in (self._side.rank, self._side.step, self._side.pass_number)]
        changes = np.zeros(len(self._rows), bool)
        changes[:1] = True
        for column in columns:
            changes[1:] |= column[1:] != column[:-1]
        begins = np.flatnonzero(changes)
        lengths = np.diff(begins, append=len(self._rows)).tolist()
        found = zip(*(column[begins].tolist() for column in columns), strict=True)
        return [scope for each, length in zip(found, lengths, strict=True) for scope in repeat(each, length)]

    @cached_property
    def number(self) -> Sequence[int]:
        if not self._renamed:
            return self._view(self._side.call[self._rows])
        return [number for _, number in self._modules_and_calls]

    @cached_property
    def seq(self) -> Sequence[int]:
        return self._view(self._side.seq[self._rows])

    @cached_property
    def first_seen(self) -> Sequence[int]:
        """For each row, the first row with the same tensor; for an operator, which is judged last, the row itself."""
        tensors = self._side.tensor_id[self._rows]
        if self.operators:
            tensors = np.array(tensors, np.int64)
            tensors[self.operators] = -1 - np.arange(len(self.operators))
        _, first, inverse = np.unique(tensors, return_index=True, return_inverse=True)
        return self._view(first[inverse])

    @staticmethod
    def _view(column: Ints) -> Sequence[int]:
        return array("q", np.ascontiguousarray(column, np.int64).tobytes())

    @cached_property
    def calls(self) -> dict[Spot, CallRows]:
        found: dict[Spot, CallRows] = {}
        self._call_of = [None] * len(self.kind)
        columns = zip(self.kind, self.scope, self.module, self.number, self.seq, strict=True)
        for row, (kind, scope, module, number, seq) in enumerate(columns):
            if kind in STATE_KINDS:
                continue
            spot = (scope, module, number)
            call = found.get(spot)
            if call is None:
                call = found[spot] = CallRows(module, scope, number, seq, -1)
            rows = call.rows.get(kind)
            if rows is None:
                call.rows[kind] = [row]
            else:
                rows.append(row)
            self._call_of[row] = call
            if kind in ("input", "output") and seq > call.end:
                call.end = seq
        self._nest(found.values())
        return found

    def _nest(self, calls: Iterable[CallRows]) -> None:
        by_place: dict[tuple[tuple[int, int, int], str], list[CallRows]] = defaultdict(list)
        for call in calls:
            by_place[call.scope, call.module].append(call)
        for call in calls:
            name = call.module
            while name:
                name = name.rpartition(".")[0]
                # Calls of one module do not overlap: the first that ends later contains this one.
                around = [c for c in by_place.get((call.scope, name), ()) if c.end >= call.end and c is not call]
                if around:
                    call.parent = min(around, key=lambda c: c.end)
                    call.parent.children.append(call)
                    break

    @cached_property
    def operators(self) -> list[int]:
        """Rows of operators below the modules. They are sources of nothing: `judge.operators` judges them apart."""
        words = self._side.kind.words if len(self._side) else []
        if "operator" not in words:
            return []
        rows: list[int] = np.flatnonzero(self._side.kind.among(("operator",))[self._rows]).tolist()
        return rows

    def phase_of(self, row: int) -> str:
        return self._side.phase[int(self._rows[row])]

    def class_of(self, row: int) -> str:
        return self._side.cls[int(self._rows[row])]

    def call_of(self, row: int) -> CallRows | None:
        return self._call_of[row] if self.calls else None

    @cached_property
    def consumers(self) -> dict[int, list[CallRows]]:
        """Calls by the number of a tensor that they were given."""
        found: dict[int, list[CallRows]] = defaultdict(list)
        for call in self.calls.values():
            for row in call.of("input"):
                found[self.tensor[row]].append(call)
        return found

    @cached_property
    def makers(self) -> dict[int, list[tuple[CallRows, int]]]:
        """Calls that returned a tensor, by its number, with the row; the innermost first."""
        found: dict[int, list[tuple[CallRows, int]]] = defaultdict(list)
        for call in self.calls.values():
            for row in call.of("output"):
                found[self.tensor[row]].append((call, row))
        for makers in found.values():
            makers.sort(key=lambda maker: self.seq[maker[1]])
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
        return {
            (self.scope[row][0], self.scope[row][1], self.module[row], kind, self.path[row], self.number[row]): row
            for row, kind in enumerate(self.kind)
            if kind in ("param", "buffer")
        }

    @cached_property
    def parameters_of(self) -> dict[tuple[int, int, str], list[int]]:
        """Rows of the parameters and buffers that a module has before a step, by (rank, step, module).

        These are its own, and those of modules inside that only hold them and are never called.
        """
        found: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        for (rank, step, module, kind, path, call), row in self.state.items():
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
        return self.state.get((rank, step - 1, module, kind, path, 1)) if before is None else before

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
        for row, kind in enumerate(self.kind):
            if kind == wanted:
                rank, step, _ = self.scope[row]
                found[rank, step, self.module[row], self.path[row].partition("~")[0]].append(row)
        return found

    @cached_property
    def own_gradients(self) -> dict[tuple[tuple[int, int, int], str], list[int]]:
        """Rows of the gradients of a module's own parameters, by scope and module."""
        found: dict[tuple[tuple[int, int, int], str], list[int]] = defaultdict(list)
        for row, kind in enumerate(self.kind):
            if kind == "param_grad":
                found[self.scope[row], self.module[row]].append(row)
        return found

    @cached_property
    def _first_step(self) -> int:
        return int(self._side.step.min())

    def is_at_start(self, row: int) -> bool:
        """Whether a row is of the first step that the reference has."""
        return self.scope[row][1] == self._first_step

    @cached_property
    def _forward_steps(self) -> set[tuple[int, int]]:
        rows = self._rows[self._side.phase.among(("forward",))[self._rows]]
        return set(zip(self._side.rank[rows].tolist(), self._side.step[rows].tolist(), strict=True))

    def has_forward(self, row: int) -> bool:
        """Whether anything of a forward pass was paired in a row's step, on its rank."""
        return self.scope[row][:2] in self._forward_steps

    @property
    def frozen(self) -> set[str]:
        return self._side.frozen

    # --- sources of a record ---------------------------------------------------------------------------------------
    def sources(self, row: int) -> list[int]:
        """Return the rows that a row's value was computed from, as far as they were recorded."""
        kind = self.kind[row]
        rank, step, _ = self.scope[row]
        if kind == "param_grad":
            return self._backward_of_parameter(row)
        if kind == "buffer":
            before = self.state.get((rank, step, self.module[row], kind, self.path[row], 0 if self.number[row] else -1))
            calls = self.calls_in_step.get((rank, step, self.module[row]), []) if self.number[row] else []
            inputs = [r for call in calls for r in call.of("input")]
            return inputs + ([before] if before is not None else self._a_step_before(row))
        if kind == "param":
            if not self.number[row]:
                return self._a_step_before(row)
            before = self.before_step((rank, step, self.module[row], kind, self.path[row]))
            parameter = (rank, step, self.module[row], self.path[row])
            gradients = self.gradients_of.get(parameter, []) + self.step_gradients_of.get(parameter, [])
            return gradients + ([before] if before is not None else [])
        if kind == "step_grad":
            return self.gradients_of.get((rank, step, self.module[row], self.path[row].partition("~")[0]), [])
        call = self.call_of(row)
        if call is None:
            return []
        if kind == "input":
            return self._before_in(call.parent, self.seq[row])
        if kind == "output":
            own = call.of("input") + [r for child in call.children for r in child.of("output")]
            return own + self.parameters_of.get((rank, step, call.module), [])
        if kind == "grad_input":
            return self._backward_of(call) + [
                r for child in call.children for r in child.of("grad_output", "grad_input")
            ]
        return self._behind(row, call)

    def made_in(self, row: int) -> list[CallRows]:
        """Return the calls whose backward made a gradient."""
        kind, call = self.kind[row], self.call_of(row)
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
        name = self.module[row]
        while not (calls := self.calls_of_module.get((self.scope[row], name), [])) and name:
            name = name.rpartition(".")[0]
        return calls

    def _backward_of_parameter(self, row: int) -> list[int]:
        """Return the rows that the gradient of a parameter is made from.

        The code of a module that calls others may use it before or after them. A module that is never called lends
        its parameter to any that are inside the one around it.
        """
        calls = self.users_of_own(row)
        inside = [child for call in calls for child in call.children]
        if calls and calls[0].module != self.module[row]:
            for call in inside:  # and those inside, as the list grows
                inside += call.children
        own = [r for call in calls for r in call.of("grad_output", "input")]
        return own + [r for call in inside for r in call.of("grad_output", "grad_input")]

    def _a_step_before(self, row: int) -> list[int]:
        rank, step, _ = self.scope[row]
        before = self.state.get((rank, step - 1, self.module[row], self.kind[row], self.path[row], 1))
        return [] if before is None else [before]

    def _before_in(self, call: CallRows | None, seq: int) -> list[int]:
        """Return what the code of a call could use at a moment: its inputs, and what its children had returned."""
        if call is None:
            return []
        returned = [r for child in call.children for r in child.of("output") if self.seq[r] < seq]
        return call.of("input") + returned + self.parameters_of.get((*call.scope[:2], call.module), [])

    def _backward_of(self, call: CallRows) -> list[int]:
        """Return the rows that the backward of a call used."""
        parameters = self.parameters_of.get((*call.scope[:2], call.module), [])
        return call.of("grad_output", "input", "output") + parameters

    def _behind(self, row: int, call: CallRows) -> list[int]:
        """Return the sources of a gradient at a call's output: those of the backward of its users."""
        users = self.users(row, call)
        found = [r for user in users for r in self._backward_of(user)]
        if users and not self._has_other_uses(row, call, users):
            return found
        around = self.outermost(row, call).parent
        if around is None:  # the root's own: the loss made it from the root's output
            return found + self.outermost(row, call).of("output")
        later = [r for child in around.children for r in child.of("grad_output", "grad_input")]
        return found + around.of("grad_output", "input", "output") + later

    def _has_other_uses(self, row: int, call: CallRows, users: Iterable[CallRows]) -> bool:
        """Whether the code around uses an output as well: its users send back much less than its gradient."""
        tensors = self.returned(row, call)
        paths = [(user, self.path[r]) for user in users for r in user.of("input") if self.tensor[r] in tensors]
        sent = [r for user, path in paths for r in user.of("grad_input") if self.path[r].partition("~")[0] == path]
        size = self._side.l2[self._rows]
        return bool(sent) and 2 * sum(float(size[r]) for r in sent) < float(size[row])

    def returned(self, row: int, call: CallRows) -> set[int]:
        """Return the numbers of the tensors whose gradient a row is."""
        path = self.path[row].partition("~")[0]
        return {self.tensor[r] for r in call.of("output") if self.path[r] == path}

    def outermost(self, row: int, call: CallRows) -> CallRows:
        """Return the outermost call around that returns the very same tensor: its gradient is this one."""
        tensors = self.returned(row, call)
        while call.parent is not None and any(self.tensor[r] in tensors for r in call.parent.of("output")):
            call = call.parent
        return call

    def passes_through(self, call: CallRows) -> bool:
        """Whether a call returns an input unchanged: its users count as that input's users."""
        given = {self.tensor[row] for row in call.of("input")}
        return any(self.tensor[row] in given for row in call.of("output"))

    def at_root(self, row: int) -> int | None:
        """Return the row of the root's own output gradient, if this row is the very same tensor; else None."""
        roots = self.calls_of_module.get((self.scope[row], ""), [])
        same = [r for root in roots for r in root.of("grad_output") if self.tensor[r] == self.tensor[row]]
        return same[0] if same else None

    def users(self, row: int, call: CallRows) -> list[CallRows]:
        """Return the calls that were given the output whose gradient this row is; only the innermost of nested ones."""
        found = [user for tensor in self.returned(row, call) for user in self.consumers.get(tensor, ())]
        found = [
            user for user in found if user is not call and not _inside(call, user) and not self.passes_through(user)
        ]
        outer = {id(user.parent) for user in found}
        return [user for user in found if id(user) not in outer]


def _inside(call: CallRows, other: CallRows) -> bool:
    """Whether a call ran inside another."""
    around = call.parent
    while around is not None:
        if around is other:
            return True
        around = around.parent
    return False
