"""Time and memory by module on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from tensortap.report import table, wording

__all__ = ["duration", "times_page"]


def duration(microseconds: float) -> str:
    """Three digits; a dash for nothing.

    >>> [duration(x) for x in (0, 0.4, 12.34, 1234.5, 2_500_000)]
    ['–', '0.40 µs', '12.3 µs', '1.23 ms', '2.50 s']
    """
    if microseconds <= 0:
        return "–"
    for unit, size in (("µs", 1.0), ("ms", 1e3), ("s", 1e6)):
        value = microseconds / size
        if value < 999.5 or unit == "s":
            break
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def times_page(facts: Mapping[str, Any], width: int | None) -> list[Text]:
    """`facts` is what `ModuleTimes.as_dict()` gives."""
    rows = facts["modules"]

    def times(phase: str, what: str) -> list[str]:
        return [duration(row[phase][what]) for row in rows]

    def sizes(phase: str) -> list[str]:
        return [_signed(row[phase]["memory"]) if row[phase]["pieces"] else "–" for row in rows]

    def some(what: str) -> bool:
        return any(row[phase][what] for row in rows for phase in ("forward", "backward", "recompute"))

    columns = [
        table.Column("module", [wording.clean(row["module"]) for row in rows], left=True, least=24),
        table.Column(
            "class", [wording.clean(row["cls"]) for row in rows], left=True, least=14, optional=5, style="dim"
        ),
        table.Column("calls", [wording.count(row["calls"]) for row in rows], optional=2),
        table.Column("forward", times("forward", "total")),
        table.Column("own fwd", times("forward", "own"), style="bold"),
        table.Column("backward", times("backward", "total")),
        table.Column("own bwd", times("backward", "own"), style="bold"),
    ]
    if any(row["recompute"]["pieces"] for row in rows):
        columns.append(table.Column("recompute", times("recompute", "total"), optional=1))
    if some("device"):
        device = [sum(row[phase]["device"] for phase in ("forward", "backward")) for row in rows]
        columns.append(table.Column("device", [duration(value) for value in device], optional=1))
    if some("memory"):
        columns.append(table.Column("memory", sizes("forward"), optional=3))
    if some("device_memory"):
        held = [_signed(row["forward"]["device_memory"]) for row in rows]
        columns.append(table.Column("device memory", held, optional=4))
    spent = {phase: sum(row[phase]["own"] for row in rows) for phase in ("forward", "backward", "recompute")}
    parts = [f"{phase} {duration(value)}" for phase, value in spent.items() if value > 0]
    head = f"{wording.plural(len(rows), 'module')} · {' · '.join(parts)}"
    lines = [Text(head, "bold"), Text(), *table.lines(columns, width), Text()]
    note = "own: without the module's parts, and without the cost of annotating"
    if any(column.title == "memory" for column, _ in table.fit(columns, width)):
        note += "; memory: allocated less freed in forward, so what stays for backward is in it"
    return lines + [Text(line, "dim") for line in wording.wrap(note, width)]


def _signed(value: int) -> str:
    return f"-{wording.nbytes(-value)}" if value < 0 else wording.nbytes(value)
