"""The calls of one step: how they are nested, which tensors they were given, and which they returned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from operator import attrgetter
from weakref import ref

from tensortap.compare.judge.record_columns import RecordColumns
from tensortap.core.records import STATE_KINDS

__all__ = ["CallRows", "Spot", "StepCalls"]

Spot = tuple[tuple[int, int, int], str, int]
"""Identifies a call: (rank, step, micro step), module, number."""
_FORWARD = ("input", "output")


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


class StepCalls:
    """The calls of the records `begin` to `end`, usually of one rank and step."""

    def __init__(self, columns: RecordColumns, begin: int, end: int) -> None:
        self._columns = columns
        self._begin, self._end = begin, end
        self._call_of: list[CallRows | None] = []
        self._users: dict[int, list[CallRows]] = {}

    @cached_property
    def by_spot(self) -> dict[Spot, CallRows]:
        """All calls, in the order of their first records."""
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
        _nest(found.values())
        return found

    def of_row(self, row: int) -> CallRows | None:
        """Return the call of a record; None if it is of state."""
        return self._call_of[row - self._begin] if self.by_spot else None

    @cached_property
    def consumers(self) -> dict[int, list[CallRows]]:
        """Calls by the number of a tensor that they were given."""
        found: dict[int, list[CallRows]] = defaultdict(list)
        tensor = self._columns.tensor
        for call in self.by_spot.values():
            for row in call.rows.get("input", ()):
                found[tensor[row]].append(call)
        return found

    @cached_property
    def makers(self) -> dict[int, list[tuple[CallRows, int]]]:
        """Calls that returned a tensor, by its number, with the row; the innermost first."""
        found: dict[int, list[tuple[CallRows, int]]] = defaultdict(list)
        tensor, seq = self._columns.tensor, self._columns.seq
        for call in self.by_spot.values():
            for row in call.of("output"):
                found[tensor[row]].append((call, row))
        for makers in found.values():
            makers.sort(key=lambda maker: seq[maker[1]])
        return found

    @cached_property
    def of_module(self) -> dict[tuple[tuple[int, int, int], str], list[CallRows]]:
        """By scope and module."""
        found: dict[tuple[tuple[int, int, int], str], list[CallRows]] = defaultdict(list)
        for call in self.by_spot.values():
            found[call.scope, call.module].append(call)
        return found

    @cached_property
    def in_step(self) -> dict[tuple[int, int, str], list[CallRows]]:
        """By rank, step and module."""
        found: dict[tuple[int, int, str], list[CallRows]] = defaultdict(list)
        for call in self.by_spot.values():
            found[call.scope[0], call.scope[1], call.module].append(call)
        return found

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
        roots = self.of_module.get((self._columns.scope[row], ""), [])
        same = [r for root in roots for r in root.of("grad_output") if tensor[r] == tensor[row]]
        return same[0] if same else None

    def users(self, row: int, call: CallRows) -> list[CallRows]:
        """Return the calls that were given the output whose gradient this row is; only the innermost of nested ones."""
        if call is not self.of_row(row):
            return self._find_users(row, self.by_spot.get(call.spot, call))
        if row not in self._users:
            self._users[row] = self._find_users(row, call)
        return self._users[row]

    def _find_users(self, row: int, call: CallRows) -> list[CallRows]:
        found = [user for tensor in self.returned(row, call) for user in self.consumers.get(tensor, ())]
        found = [
            user for user in found if user is not call and not _is_inside(call, user) and not self.passes_through(user)
        ]
        outer = [user.parent for user in found if user.parent is not None]
        return [user for user in found if not any(user is each for each in outer)]


def _nest(calls: Iterable[CallRows]) -> None:
    """Put each call into the one that it ran inside: the nearest module above whose call spans it."""
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


def _is_inside(call: CallRows, other: CallRows) -> bool:
    """Whether a call ran inside another."""
    around = call.parent
    while around is not None:
        if around is other:
            return True
        around = around.parent
    return False
