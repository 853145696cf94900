"""The candidate in the reference's terms: with its names, and its tensors in the reference's layout.

Only a mapping needs it. Rows refer to rows of the candidate's own side. A tensor that the reference has in several
parts has as many rows; several that the reference has in one have one row.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.compare.align.side import Bools, Ints, Names, Side, hash_of_shape
from tensortap.compare.translate.fused import Fusions
from tensortap.core import statistics
from tensortap.core.records import STATE_KINDS, Key
from tensortap.mapping.layouts import LayoutConversion, Shape
from tensortap.mapping.model_mapping import ModelMapping
from tensortap.mapping.outline import full_name

__all__ = ["Translated"]

_GRADIENTS = ("param_grad", "step_grad")
"""Kinds of gradients of parameters: a tied one has the sum over all of its uses."""
_UNPLACED = "\0"
"""Prefix of a module without a counterpart, so that it matches no module of the reference."""


@dataclass(frozen=True)
class _Target:
    """The reference's module, kind and path for records of the candidate."""

    module: str
    kind: str
    path: str
    reading: LayoutConversion | None = None
    added: tuple[tuple[str, LayoutConversion], ...] = ()
    """Tensors that the reference ties to it and the candidate has separately: the reference's gradient is the sum."""
    call: int = -1
    """The reference's call, if it has another number there."""


class Translated(Side):
    """A side whose modules, kinds and paths are the reference's. Keys, classes and shapes stay its own."""

    def __init__(self, own: Side, plan: ModelMapping, kinds_known: bool = True, fusions: Fusions | None = None) -> None:
        """Against a checkpoint, which does not know its buffers from its parameters, all are parameters."""
        self._fusions = fusions or Fusions()
        self.run, self.ranks, self.own, self._chosen = own.run, own.ranks, own, own._chosen
        self._kinds_known = kinds_known
        self._made_by: dict[str, list[tuple[str, LayoutConversion]]] = {}
        for made, reading in plan.tensor_matches.conversions.items():
            for part in reading.parts:
                self._made_by.setdefault(part, []).append((made, reading))
        self._sums: dict[str, list[tuple[str, LayoutConversion]]] = {}
        for part, first in plan.ties[0].items():
            self._sums.setdefault(first, []).append((part, self._made_by[part][0][1]))
        spots, calls, codes = _spots(own, self._fusions.modules)
        targets = [self._routed(plan, spot, call) for spot, call in zip(spots, calls, strict=True)]
        counts = np.array([len(each) for each in targets], np.int64)
        times = counts[codes] if len(codes) else np.empty(0, np.int64)
        self.origin = np.repeat(np.arange(len(own)), times)
        before = np.repeat(np.cumsum(times) - times, times)
        starts = np.cumsum(counts) - counts
        which = starts[codes[self.origin]] + np.arange(len(self.origin)) - before
        flat = [target for each in targets for target in each]
        self.row, self.rank = own.row[self.origin], own.rank[self.origin]
        self.without_evaluation, self.without_operators = own.without_evaluation, own.without_operators
        self._readings = [target.reading for target in flat]
        self._added = [target.added for target in flat]
        self._which = which
        self.module, self.kind, self.path = (
            _named([getattr(target, name) for target in flat], which) for name in ("module", "kind", "path")
        )
        self._parts = self._join(spots, codes)
        if self._fusions.routes:
            moved = np.array([target.call for target in flat], np.int64)[which]
            self.call = np.where(moved >= 0, moved, own.call[self.origin])

    @staticmethod
    def _unplaced(module: str, kind: str, path: str) -> list[_Target]:
        return [_Target(_UNPLACED + module, kind, path)]

    def _routed(self, plan: ModelMapping, spot: tuple[str, str, str], call: int) -> list[_Target]:
        """Return the targets of records, with modules that include what the other side has separately."""
        module, kind, _ = spot
        found = self._targets(plan, *spot)
        key = (module, kind.removeprefix("grad_"), call)
        if kind in STATE_KINDS or key not in self._fusions.routes or not found:
            return found
        route = self._fusions.routes[key]
        if route is None:
            return self._unplaced(*spot)
        return [replace(target, module=route[0], call=route[1]) for target in found]

    def _targets(self, plan: ModelMapping, module: str, kind: str, path: str) -> list[_Target]:
        if plan.ignored(1, module, kind, path.partition("~")[0]):
            return []
        if kind in STATE_KINDS:
            return self._state_targets(plan, module, kind, path)
        if module not in plan.modules:
            return self._unplaced(module, kind, path)
        base, again, number = path.partition("~")
        flow = plan.value_matches.get((module, kind.removeprefix("grad_"), base))
        if flow is None:
            return [_Target(plan.modules[module], kind, path)]
        reading = LayoutConversion((), flow.permute) if flow.permute else None
        return [_Target(plan.modules[module], kind, flow.path + again + number, reading)]

    def _state_targets(self, plan: ModelMapping, module: str, kind: str, path: str) -> list[_Target]:
        base, again, number = path.partition("~")
        name = full_name(module, base)
        if kind in _GRADIENTS and name in plan.ties[0]:
            return []  # it is added to what the reference ties it to
        if kind in _GRADIENTS and name in plan.ties[1].values():
            return self._unplaced(module, kind, path)  # a sum, whose parts are unknown
        found = []
        for made, reading in self._made_by.get(name, ()):
            if reading.parts[0] != name:
                continue  # it comes with the first of the parts
            at = plan.module_matches.target.find(made)
            assert at is not None
            own = plan.module_matches.target.tensor(made)
            kept = own.kind if kind not in _GRADIENTS and self._kinds_known else kind
            changed = not reading.plain or own.shape != plan.module_matches.source.tensor(name).shape
            added = tuple(self._sums.get(made, ())) if kind in _GRADIENTS else ()
            found.append(_Target(at[0], kept, at[1] + again + number, reading if changed or added else None, added))
        return found if name in self._made_by else self._unplaced(module, kind, path)

    def _join(self, spots: list[tuple[str, str, str]], codes: Ints) -> dict[int, list[int]]:
        """Return the own rows of each row that consists of several. A row that lacks one of them is unplaced."""
        joined = [at for at in range(len(self._readings)) if len(self._part_names(at)) > 1]
        rows = np.flatnonzero(np.isin(self._which, joined)).tolist()
        if not rows:
            return {}
        wanted = {part for at in joined for part in self._part_names(at)}
        having = [full_name(module, path.partition("~")[0]) in wanted for module, _, path in spots]
        by_key = {self._spot(row): row for row in np.flatnonzero(np.array(having)[codes]).tolist()}
        found: dict[int, list[int]] = {}
        lost = []
        for row in rows:
            first = self._spot(int(self.origin[row]))
            parts = [by_key.get((part, *first[1:])) for part in self._part_names(self._which[row])]
            if None in parts:
                lost.append(row)
            found[row] = [part for part in parts if part is not None]
        if lost:
            words = [*self.module.words, _UNPLACED]
            codes = self.module.codes.copy()
            codes[lost] = len(words) - 1
            self.module = Names(codes, words)
        return found

    def _part_names(self, at: int) -> tuple[str, ...]:
        """Return the names of a target's parts; those that are added to it come last."""
        reading = self._readings[at]
        return () if reading is None else reading.parts + tuple(name for name, _ in self._added[at])

    def _spot(self, row: int) -> tuple[Any, ...]:
        own, (path, _, number) = self.own, self.own.path[row].partition("~")
        where = (
            int(own.rank[row]),
            int(own.step[row]),
            int(own.pass_number[row]),
            int(own.call[row]),
            own.kind[row],
            number,
        )
        return (full_name(own.module[row], path), *where)

    # --- columns -----------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self.origin)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("own", "origin"):
            raise AttributeError(name)
        column = getattr(self.own, name)[self.origin]
        statistic = next((each for each in statistics.stored() if each.name == name), None)
        counts = statistic is not None and statistic.is_count
        moment = statistic is not None and (statistic.dtype == "float64" or statistic.is_added)
        if moment:
            column = column.astype(np.float64, copy=False)  # NaN is "not known"
        for row, parts in self._parts.items():
            numbers = getattr(self.own, name)[parts]
            summed = bool(self._added[self._which[row]])
            if counts and not (summed and name == "elements"):
                column[row] = numbers.sum()
            elif moment:
                column[row] = np.sqrt(np.square(numbers).sum()) if name == "l2" and not summed else np.nan
        if moment:
            column[self.cut] = np.nan  # a part has no statistics but those of its elements
        setattr(self, name, column)
        return column

    def names(self, column: str) -> Names:
        own = self.own.names(column)
        return Names(own.codes[self.origin], own.words)

    @cached_property
    def shapes(self) -> Any:
        return self.own.shapes.take(pa.array(self.origin))

    @cached_property
    def kept(self) -> Bools:
        found: Bools = self.own.kept[self.origin]
        for row, parts in self._parts.items():
            found[row] = bool(self.own.kept[parts].all())
        return found

    @cached_property
    def cut(self) -> Bools:
        """Whether a row is a part of a tensor."""
        parts = np.array([reading is not None and reading.cut is not None for reading in self._readings], bool)
        return parts[self._which] if len(parts) else np.zeros(len(self), bool)

    @cached_property
    def relaid(self) -> Bools:
        having = np.array([reading is not None for reading in self._readings], bool)
        return having[self._which] if len(having) else np.zeros(len(self), bool)

    @cached_property
    def reordered(self) -> Bools:
        found = np.zeros(len(self), bool)
        for row in np.flatnonzero(self.relaid).tolist():
            found[row] = row in self._parts or self.reading(row).moves(self.shape(row))
        return found

    @cached_property
    def shape_hash(self) -> npt.NDArray[np.uint64]:
        found: npt.NDArray[np.uint64] = self.own.shape_hash[self.origin]
        for row in np.flatnonzero(self.relaid).tolist():
            shape = self.read_shape(row)
            found[row] = 0 if shape is None else hash_of_shape(shape)
        return found

    # --- rows --------------------------------------------------------------------------------------------------------
    def reading(self, row: int) -> LayoutConversion:
        """Return the conversion of a row's tensor. The row must be `relaid`."""
        found: LayoutConversion | None = self._readings[self._which[row]]
        assert found is not None
        return found

    def read_shape(self, row: int) -> Shape | None:
        """Return the shape in the reference's layout; None if the tensor cannot be read in it."""
        reading = self.reading(row)
        shapes = [self.own.shape(part) for part in self._own_rows(row)[: len(reading.parts) or 1]]
        found = reading.result(shapes)
        if found is None or reading.shape is None or np.prod(found) != np.prod(reading.shape):
            return found
        return reading.shape

    def _own_rows(self, row: int) -> list[int]:
        return self._parts.get(row) or [int(self.origin[row])]

    def rescale(self, rows: Ints, factor: float) -> None:
        super().rescale(rows, factor)  # the columns and sketches in the reference's terms; `array` reads its own side
        self.own.rescale(np.unique([own for row in rows.tolist() for own in self._own_rows(row)]), factor)

    def key(self, row: int) -> Key:
        return self.own.key(int(self.origin[row]))

    def locations(self, rows: Ints) -> list[tuple[str, int, int]]:
        return self.own.locations(self.origin[rows])

    def array(self, row: int) -> npt.NDArray[Any]:
        arrays = [self.own.array(part) for part in self._own_rows(row)]
        if not self.relaid[row]:
            return arrays[0]
        reading, added = self.reading(row), self._added[self._which[row]]
        first = len(arrays) - len(added)
        found = reading.apply(arrays[:first])
        for (_, how), array in zip(added, arrays[first:], strict=True):
            found = found + how.apply([array])
        return found


def _spots(side: Side, by_call: Collection[str] = ()) -> tuple[list[tuple[str, str, str]], list[int], Ints]:
    """Return every (module, kind, path) of a side, separately for each call of the modules `by_call`, and for each row
    the number of its own."""
    columns = [side.module, side.kind, side.path]
    if not len(side):
        return [], [], np.empty(0, np.int64)
    whole = np.zeros(len(side), np.int64)
    for column in columns:
        whole = whole * len(column.words) + column.codes
    calls = np.where(side.module.among(by_call), side.call, 0) if by_call else np.zeros(len(side), np.int64)
    whole = whole * (int(calls.max()) + 1) + calls
    _, first, codes = np.unique(whole, return_index=True, return_inverse=True)
    spots = [(side.module[row], side.kind[row], side.path[row]) for row in first.tolist()]
    return spots, calls[first].tolist(), codes.reshape(-1).astype(np.int64)


def _named(words: list[str], which: Ints) -> Names:
    known = {word: code for code, word in enumerate(dict.fromkeys(words))}
    codes = np.array([known[word] for word in words], np.int64)
    return Names(codes[which] if len(codes) else np.empty(0, np.int64), list(known))
