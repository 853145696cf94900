"""Records of step_grad that a run left out, because the optimizer got the gradient from backward unchanged.

If one side clips and the other does not, only one has records of step_grad. The other's are its only `param_grad`: both
sides are completed, so that they can be paired.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tensortap.compare.align.side import Ints, Side
from tensortap.mapping.outline import full_name
from tensortap.store.compact import compact, is_text

__all__ = ["complete_step_gradients", "uncleared_since"]

_EQUAL = "equal to param_grad"
_SAME_SUM = 1e-3
"""Relative error up to which a gradient is a sum of others, in any dtype but the shortest."""


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


def uncleared_since(side: Side, row: int) -> int | None:
    """Return the step from which on the gradient that an optimizer got sums those from backward, if that is an earlier
    one: the gradients were not cleared. Sketches are linear, so those of a sum are known."""
    name = full_name(side.module[row], side.path[row])
    same = side.kind.among(("param_grad",)) & (side.rank == side.rank[row]) & (side.step <= side.step[row])
    by_step: dict[int, list[int]] = {}
    for each in np.flatnonzero(same).tolist():
        if full_name(side.module[each], side.path[each].partition("~")[0]) == name:
            by_step.setdefault(int(side.step[each]), []).append(each)
    steps = sorted(by_step, reverse=True)
    needed = np.array([row, *(each for rows in by_step.values() for each in rows)])
    if not steps or steps[0] != side.step[row] or not side.has_sketch[needed].all():
        return None
    got = side.sketches_at(needed[:1])[0].astype(np.float64)
    total = np.zeros_like(got)
    with np.errstate(invalid="ignore", over="ignore"):
        for step in steps:
            total += side.sketches_at(np.array(by_step[step])).astype(np.float64).sum(axis=0)
            if np.linalg.norm(total - got) <= _SAME_SUM * np.linalg.norm(got):
                return step if step < steps[0] and np.any(got) else None
    return None
