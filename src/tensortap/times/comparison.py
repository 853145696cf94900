"""Comparison of two profiles: the difference in time of each row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tensortap.errors import UsageError
from tensortap.times.facts import FORMAT, VERSION, head_of
from tensortap.times.ledger import TimeLedger
from tensortap.times.table import Row, make_table

__all__ = ["MEASURES", "compare_times"]

MEASURES = ("own", "total", "device_own", "device_total")
_COLUMN_OF = {"own": "cpu_own", "total": "cpu_total", "device_own": "device_own", "device_total": "device_total"}


@dataclass(slots=True)
class _Sums:
    """The measures of one side, summed over the rows of one name and phase."""

    calls: int = 0
    own: float = 0.0
    total: float = 0.0
    device_own: float = 0.0
    device_total: float = 0.0

    def add(self, row: Row) -> None:
        self.calls += row.calls
        for measure in MEASURES:
            setattr(self, measure, getattr(self, measure) + getattr(row, measure))


def compare_times(
    candidate: TimeLedger,
    reference: TimeLedger,
    *,
    by: str = "module",
    depth: int | None = None,
    sort: str | None = None,
    top: int | None = None,
) -> dict[str, Any]:
    """Return the rows of both profiles as plain data, sorted by the absolute difference, the largest first.

    A difference is candidate minus reference. A ratio is candidate over reference, or None if the reference is 0.
    `sort` names the measure to sort by: one of MEASURES. Rows match by module and phase, or, with `by="class"`, by
    class and phase.
    """
    measure = sort or ("device_own" if candidate.kernels and reference.kernels else "own")
    if measure not in MEASURES:
        raise UsageError(
            f"sort: {sort!r} is not a measure by which two profiles can be compared: choose from {', '.join(MEASURES)}"
        )
    sides = [
        _sums_by_name(make_table(ledger, by=by, depth=depth, sort="order").rows) for ledger in (candidate, reference)
    ]
    names = list(dict.fromkeys([*sides[0], *sides[1]]))
    rows = [_row(name, *(side.get(name) for side in sides)) for name in names]
    rows.sort(key=lambda row: -abs(row[f"{_COLUMN_OF[measure]}_difference"]))
    return {
        "format": FORMAT,
        "version": VERSION,
        "candidate": head_of(candidate),
        "reference": head_of(reference),
        "by": by,
        "measure": _COLUMN_OF[measure],
        "rows": rows[:top] if top else rows,
        "rows_left_out": max(0, len(rows) - top) if top else 0,
    }


def _sums_by_name(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[str, _Sums]]:
    """Return class and sums by name and phase. A module keeps its row if its class differs between the profiles."""
    found: dict[tuple[str, str], tuple[str, _Sums]] = {}
    for row in rows:
        found.setdefault((row.module or row.cls, row.phase), (row.cls, _Sums()))[1].add(row)
    return found


def _row(
    name: tuple[str, str], candidate: tuple[str, _Sums] | None, reference: tuple[str, _Sums] | None
) -> dict[str, Any]:
    cls, sums = candidate or reference or ("", _Sums())
    reference_sums = reference[1] if reference is not None else _Sums()
    sums = sums if candidate is not None else _Sums()
    row: dict[str, Any] = {"module": name[0], "class": cls, "phase": name[1]}
    row |= {"calls": sums.calls, "calls_reference": reference_sums.calls}
    for measure, column in _COLUMN_OF.items():
        value, other = getattr(sums, measure), getattr(reference_sums, measure)
        row[column] = value
        row[f"{column}_reference"] = other
        row[f"{column}_difference"] = value - other
        row[f"{column}_ratio"] = value / other if other else None
    return row
