"""Records of step_grad that a run left out, because the optimizer got the gradient from backward unchanged.

If one side clips and the other does not, only one has records of step_grad. The other's are its only `param_grad`: both
sides are completed, so that they can be paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.compare.align.side import Ints, Side
from tensortap.mapping.outline import full_name
from tensortap.store.compact import compact, is_text

__all__ = ["StepGradientOrigin", "complete_step_gradients", "multiple_of", "origin_of_step_gradient"]

_EQUAL = "equal to param_grad"
_SAME_SUM = 1e-3
"""Relative error up to which a gradient is a multiple of a sum of others, in any dtype but the shortest."""


def complete_step_gradients(reference: Side, candidate: Side) -> None:
    """Add the records of step_grad that were left out to both sides, if one of them has any."""
    if any("step_grad" in side.kind.words for side in (reference, candidate)):
        for side in (reference, candidate):
            _complete(side)


def _complete(side: Side) -> None:
    rows = _only_gradients(side)
    if not len(rows):
        return
    count = len(side)
    gradients = np.flatnonzero(side.kind.among(("param_grad",)))
    steps = side.rank << 40 | side.step
    last = {int(steps[row]): int(row) for row in gradients.tolist()}
    place = np.array([last[int(steps[row])] for row in rows.tolist()], np.int64)
    source = np.concatenate([np.arange(count), rows])
    added = np.concatenate([np.zeros(count, bool), np.ones(len(rows), bool)])
    order = np.lexsort((added, np.concatenate([np.arange(count), place])))  # after the last gradient of their step
    seq = np.concatenate([side.seq, side.seq[place]])[order]
    source, added = source[order], added[order]
    table = side.table.take(pa.array(source))
    changed = {"kind": "step_grad", "phase": "state"}
    for name, value in changed.items():
        old = table.column(name).to_numpy(zero_copy_only=False)
        table = _with(table, name, np.where(added, value, old).tolist())
    table = _with(table, "micro", np.where(added, 0, side.micro[source]).tolist())
    table = _with(table, "seq", seq.tolist())
    side.replace(compact(table), side.row[source], side.rank[source])


def _with(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    place = table.column_names.index(name)
    field = table.schema.field(place)
    kind = pa.string() if is_text(field.type) else field.type
    return table.set_column(place, field.with_type(kind), pa.array(values, kind))


def _only_gradients(side: Side) -> Ints:
    """Return the gradients from backward that the optimizer got unchanged: the only ones in a step, without a
    step_grad, of parameters that an optimizer holds."""
    found: dict[tuple[int, int, str], list[int]] = {}
    held = _Held(side)
    for row in np.flatnonzero(side.kind.among(("param_grad", "step_grad"))).tolist():
        name = full_name(side.module[row], side.path[row].partition("~")[0])
        found.setdefault((int(side.rank[row]), int(side.step[row]), name), []).append(row)
    alone = [rows[0] for key, rows in found.items() if len(rows) == 1 and held.unchanged(*key)]
    return np.array([row for row in alone if side.kind[row] == "param_grad"], np.int64)


class _Held:
    """Which gradients an optimizer got unchanged if it has no record of them, by the loop facts of each rank."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._known: dict[tuple[int, int], set[str]] = {}

    def unchanged(self, rank: int, step: int, parameter: str) -> bool:
        if (rank, step) not in self._known:
            self._known[rank, step] = self._parameters(rank, step)
        return parameter in self._known[rank, step]

    def _parameters(self, rank: int, step: int) -> set[str]:
        facts = self._side.run.loop(rank)
        found: set[str] = set()
        for of in facts.subjects("parameters"):
            value = facts.value("step_grad", step, of.rpartition(".")[0]) or {}
            names = (facts.value("parameters", step, of) or {}).get("names") or ()
            if value.get("absent") == _EQUAL:
                found |= set(names) - set(value.get("no_gradient") or ())
        return found


class StepGradientOrigin(NamedTuple):
    """The origin of a gradient that an optimizer got: a multiple of gradients from backward."""

    factor: float
    since: int
    """The first step whose gradients are in it; an earlier one if gradients were not cleared."""
    micros: int
    """The number of micro batches of its step that are in it."""
    is_last_micro: bool = False
    """Whether it is that of the last micro batch alone."""


def origin_of_step_gradient(side: Side, row: int) -> StepGradientOrigin | None:
    """Return what a record of step_grad was made from; None if it is no multiple of any sum of gradients.

    Sketches are linear, so those of a sum are known.
    """
    by_step = _gradients_from_backward(side, row)
    now = int(side.step[row])
    needed = np.array([row, *(each for rows in by_step.values() for each in rows)])
    if now not in by_step or not side.has_sketch[needed].all():
        return None
    got, parts = _sketches(side, [row])[0], _sketches(side, by_step[now])
    total, micros = parts.sum(axis=0), len(set(side.micro[by_step[now]].tolist()))
    if factor := multiple_of(got, total):
        return StepGradientOrigin(factor, now, micros)
    if micros > 1 and (factor := multiple_of(got, parts[-1])):
        return StepGradientOrigin(factor, now, 1, is_last_micro=True)
    # What was not cleared may have been changed in place before, as by clipping.
    before = _step_gradient_before(side, row)
    if before is not None and (factor := multiple_of(got, total + _sketches(side, [before])[0])):
        earlier = origin_of_step_gradient(side, before)
        return StepGradientOrigin(factor, int(side.step[before]) if earlier is None else earlier.since, micros)
    for step in sorted(by_step, reverse=True)[1:]:
        total = total + _sketches(side, by_step[step]).sum(axis=0)
        if factor := multiple_of(got, total):
            return StepGradientOrigin(factor, step, micros)
    return None


def _sketches(side: Side, rows: Sequence[int]) -> npt.NDArray[np.float64]:
    return side.sketches_at(np.array(rows)).astype(np.float64)


def _step_gradient_before(side: Side, row: int) -> int | None:
    """Return the row of what the optimizer got of the same parameter in the last step before that has a record."""
    same = side.kind.among(("step_grad",)) & (side.rank == side.rank[row]) & (side.step < side.step[row])
    same &= side.has_sketch & (side.module.codes == side.module.codes[row])
    rows = [each for each in np.flatnonzero(same).tolist() if side.path[each] == side.path[row]]
    return max(rows, key=lambda each: int(side.step[each]), default=None)


def _gradients_from_backward(side: Side, row: int) -> dict[int, list[int]]:
    """Return the rows of a parameter's gradients from backward up to a step, by step and in order of micro batches."""
    name = full_name(side.module[row], side.path[row])
    same = side.kind.among(("param_grad",)) & (side.rank == side.rank[row]) & (side.step <= side.step[row])
    found: dict[int, list[int]] = {}
    for each in sorted(np.flatnonzero(same).tolist(), key=lambda each: int(side.micro[each])):
        if full_name(side.module[each], side.path[each].partition("~")[0]) == name:
            found.setdefault(int(side.step[each]), []).append(each)
    return found


def multiple_of(sketch: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """Return by which positive factor one sketch is another one's multiple; 0 if it is none."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = float(other @ other)
        factor = float(sketch @ other) / size if size > 0 else 0.0
        is_multiple = np.linalg.norm(sketch - factor * other) <= _SAME_SUM * np.linalg.norm(sketch)
    return factor if factor > 0 and is_multiple else 0.0
