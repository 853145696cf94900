"""Two ledgers side by side: what takes longer, and by how much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tensortap.errors import UsageError
from tensortap.times.facts import FORMAT, VERSION, head_of
from tensortap.times.ledger import Ledger
from tensortap.times.table import Row, table

__all__ = ["MEASURES", "compared"]

MEASURES = ("own", "total", "device_own", "device_total")
_SHOWN = {"own": "cpu_own", "total": "cpu_total", "device_own": "device_own", "device_total": "device_total"}


@dataclass(slots=True)
class _Sums:
    """The measures of one side's rows that go by the same name."""

    calls: int = 0
    own: float = 0.0
    total: float = 0.0
    device_own: float = 0.0
    device_total: float = 0.0

    def add(self, row: Row) -> None:
        self.calls += row.calls
        for measure in MEASURES:
            setattr(self, measure, getattr(self, measure) + getattr(row, measure))


def compared(
    candidate: Ledger,
    reference: Ledger,
    *,
    by: str = "module",
    depth: int | None = None,
    sort: str | None = None,
    top: int | None = None,
) -> dict[str, Any]:
    """Return the rows of both profiles as plain data, the largest difference first, in either direction.

    A difference is candidate less reference, a ratio candidate over reference; it is None where the reference has
    nothing. `sort` names the measure to go by: one of MEASURES. Rows match by module and phase; with `by="class"` by
    class and phase.
    """
    measure = sort or ("device_own" if candidate.kernels and reference.kernels else "own")
    if measure not in MEASURES:
        raise UsageError(f"sort: {sort!r} is none of {', '.join(MEASURES)}, by which two profiles can be compared")
    sides = [_by_name(table(ledger, by=by, depth=depth, sort="order").rows) for ledger in (candidate, reference)]
    names = list(dict.fromkeys([*sides[0], *sides[1]]))
    rows = [_row(name, *(side.get(name) for side in sides)) for name in names]
    rows.sort(key=lambda row: -abs(row[f"{_SHOWN[measure]}_difference"]))
    return {
        "format": FORMAT,
        "version": VERSION,
        "candidate": head_of(candidate),
        "reference": head_of(reference),
        "by": by,
        "measure": _SHOWN[measure],
        "rows": rows[:top] if top else rows,
        "rows_left_out": max(0, len(rows) - top) if top else 0,
    }


def _by_name(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[str, _Sums]]:
    """Class and sums by name and phase. A module keeps its row when its class is replaced by another one."""
    found: dict[tuple[str, str], tuple[str, _Sums]] = {}
    for row in rows:
        found.setdefault((row.module or row.cls, row.phase), (row.cls, _Sums()))[1].add(row)
    return found


def _row(
    name: tuple[str, str], candidate: tuple[str, _Sums] | None, reference: tuple[str, _Sums] | None
) -> dict[str, Any]:
    cls, sums = candidate or reference or ("", _Sums())
    others = reference[1] if reference is not None else _Sums()
    sums = sums if candidate is not None else _Sums()
    row: dict[str, Any] = {"module": name[0], "class": cls, "phase": name[1]}
    row |= {"calls": sums.calls, "calls_reference": others.calls}
    for measure, shown in _SHOWN.items():
        ours, theirs = getattr(sums, measure), getattr(others, measure)
        row[shown] = ours
        row[f"{shown}_reference"] = theirs
        row[f"{shown}_difference"] = ours - theirs
        row[f"{shown}_ratio"] = ours / theirs if theirs else None
    return row
