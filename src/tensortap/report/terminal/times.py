"""Time and memory by module on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.text import Text

from tensortap.report import wording
from tensortap.report.terminal import table

__all__ = ["compared_page", "duration", "times_page"]

_OWN = "own: without the module's parts, and without the cost of annotating"
_BACKWARD = "calls in backward are graph nodes"
_OPTIMIZERS = ("(optimizer)", "(zero_grad)")


def duration(microseconds: float) -> str:
    """Return three digits and a unit, or a dash for zero.

    >>> [duration(x) for x in (0, 0.4, 12.34, 1234.5, 2_500_000, -12.34)]
    ['–', '0.40 µs', '12.3 µs', '1.23 ms', '2.50 s', '-12.3 µs']
    """
    if not microseconds:
        return "–"
    size = abs(microseconds)
    for unit, length in (("µs", 1.0), ("ms", 1e3), ("s", 1e6)):
        value = size / length
        if value < 999.5 or unit == "s":
            break
    sign = "-" if microseconds < 0 else ""
    return f"{sign}{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def times_page(facts: Mapping[str, Any], width: int | None) -> list[Text]:
    """Render one profile, the result of `ModuleTimes.as_dict()`."""
    rows = facts["rows"]
    columns = _names(rows, facts["by"])
    host = [
        table.TableColumn("own", _durations(rows, "cpu_own"), style="bold"),
        table.TableColumn("own %", _shares(rows, "cpu_own_share")),
        table.TableColumn("total", _durations(rows, "cpu_total"), optional=2),
    ]
    if facts["device"]["kernels"]:
        columns += [
            table.TableColumn("device own", _durations(rows, "device_own"), style="bold"),
            table.TableColumn("device %", _shares(rows, "device_own_share"), optional=1),
            table.TableColumn("device total", _durations(rows, "device_total"), optional=4),
        ]
        host[1:] = [table.TableColumn(each.title, each.cells, optional=5) for each in host[1:]]
    columns += host
    for title, key, rank in (("memory", "memory", 7), ("device memory", "device_memory", 6)):
        if any(row[key] for row in rows):
            columns.append(table.TableColumn(title, [_signed(row[key]) for row in rows], optional=rank))
    lines = [*_head(facts, width), Text(), *table.lines(columns, width), *_left_out(facts, width), Text()]
    by_node = facts["backward_calls"] == "graph nodes" and any(row["phase"] == "backward" for row in rows)
    notes = [_OWN, _BACKWARD] if by_node else [_OWN]
    if any(column.title == "memory" for column, _ in table.fit(columns, width)):
        notes.append("memory: allocated less freed")
    return lines + [Text(line, "dim") for line in wording.wrap("; ".join(notes), width)]


def compared_page(facts: Mapping[str, Any], width: int | None) -> list[Text]:
    """Render two profiles; `facts` is the result of `times.comparison.compare_times`."""
    rows, measure = facts["rows"], facts["measure"]
    ratios = [f"{ratio:.2f}" if (ratio := row[f"{measure}_ratio"]) is not None else "–" for row in rows]
    columns = [
        *_names(rows, facts["by"]),
        table.TableColumn("reference", _durations(rows, f"{measure}_reference")),
        table.TableColumn("this", _durations(rows, measure), style="bold"),
        table.TableColumn("difference", _durations(rows, f"{measure}_difference", plus=True), style="bold"),
        table.TableColumn("ratio", ratios),
    ]
    what = "device" if measure.startswith("device") else "CPU"
    kind = "own" if measure.endswith("own") else "total"
    lines = []
    for title, side in (("this", "candidate"), ("reference", "reference")):
        head = facts[side]
        lines += _wrapped(f"{title}: {head.get('trace', '')} · {_summary(head)}".replace(":  · ", ": "), width, "bold")
    lines += _wrapped(f"{what} {kind} time of each row, the largest difference first", width, "dim")
    return [*lines, Text(), *table.lines(columns, width), *_left_out(facts, width)]


def _names(rows: Sequence[Mapping[str, Any]], by: str) -> list[table.TableColumn]:
    module = [wording.clean(row["module"]) for row in rows]
    cls = [wording.clean(row["class"]) for row in rows]
    phase = table.TableColumn("phase", [row["phase"] for row in rows], left=True)
    calls = table.TableColumn(
        "calls", [wording.count(row["calls"]) if row["calls"] else "–" for row in rows], optional=3
    )
    if by == "class":
        names = [
            f"{name} {kind}" if name in _OPTIMIZERS else name or kind for name, kind in zip(module, cls, strict=True)
        ]
        return [table.TableColumn("class", names, left=True, least=20), phase, calls]
    return [
        table.TableColumn("module", module, left=True, least=24),
        table.TableColumn("class", cls, left=True, least=14, optional=8, style="dim"),
        phase,
        calls,
    ]


def _head(facts: Mapping[str, Any], width: int | None) -> list[Text]:
    lines = _wrapped(_summary(facts), width, "bold")
    device = facts["device"]
    if device["unlinked"]:
        lines += _wrapped(
            f"The launch of {wording.plural(device['unlinked'], 'kernel')} is not in the profile; their time is in "
            "(no module).",
            width,
            "dim",
        )
    return lines


def _summary(facts: Mapping[str, Any]) -> str:
    device = facts["device"]
    parts = [wording.plural(facts["steps"], "step"), f"{duration(facts['span'])} on the CPU"]
    if facts.get("per_step"):
        parts[1] += " a step"
    if device["kernels"]:
        parts.append(f"{wording.plural(device['kernels'], 'kernel')} of {duration(device['time'])}")
        parts.append(f"device busy {duration(device['busy'])}")
    return " · ".join(parts)


def _left_out(facts: Mapping[str, Any], width: int | None) -> list[Text]:
    if not facts["rows_left_out"]:
        return []
    rest = f", {duration(facts['cpu_own_left_out'])} of own time" if facts.get("cpu_own_left_out") else ""
    return _wrapped(f"{wording.plural(facts['rows_left_out'], 'more row')}{rest}; --top 0 shows all", width, "dim")


def _wrapped(words: str, width: int | None, style: str) -> list[Text]:
    return [Text(line, style) for line in wording.wrap(wording.clean(words), width)]


def _durations(rows: Sequence[Mapping[str, Any]], key: str, plus: bool = False) -> list[str]:
    return [f"+{duration(row[key])}" if plus and row[key] > 0 else duration(row[key]) for row in rows]


def _shares(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    share: Callable[[float], str] = wording.percent
    return [share(row[key]) if row[key] else "–" for row in rows]


def _signed(value: float) -> str:
    size = wording.nbytes(round(abs(value)))
    return "–" if not value else f"-{size}" if value < 0 else size
