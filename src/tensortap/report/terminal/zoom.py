"""The operators of two modules, aligned, on the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tensortap.core.records import RIGHT_STATUSES
from tensortap.report import wording
from tensortap.report.terminal import table

__all__ = ["zoom_page"]

_AROUND = 6
"""Rows that are shown before and after the first difference."""
_MARKS = {"equal": "=", "close": "≈", "differs": "✖", "reference only": "−", "candidate only": "+"}
_STYLES = {"differs": "red", "reference only": "yellow", "candidate only": "yellow"}


def zoom_page(facts: Mapping[str, Any], width: int | None, every: bool = False) -> list[Text]:
    """Render a zoom, the result of `Zoom.as_dict()`: the sentence, and the operators around the first difference."""
    mark, style = {"match": ("✔", "green"), "imprecise": ("≈", "yellow")}.get(facts["verdict"], ("✖", "bold red"))
    lines = [Text(line, style) for line in wording.wrap(wording.clean(f"{mark} {facts['sentence']}"), width)]
    rows = facts["operators"]
    shown = rows if every else _around(rows, facts["line"], facts["verdict"])
    if shown:
        lines += [Text(), *table.lines(_columns(shown), width)]
        if len(shown) < len(rows):
            lines.append(Text(f"{len(rows) - len(shown)} more operators; --all shows them", "dim"))
    notes = [line for note in facts["notes"] for line in wording.wrap(wording.clean(note), width)]
    return [*lines, Text(), *(Text(note, "dim") for note in notes)] if notes else lines


def _around(rows: Sequence[Mapping[str, Any]], line: Mapping[str, Any] | None, verdict: str) -> Sequence[Any]:
    """Return the rows near the line that is named, or the first row that differs."""
    if verdict == "match":
        return []

    def is_named(row: Mapping[str, Any]) -> bool:
        ours = row["candidate"]
        at = None if ours is None else ours["line"]
        return line is not None and at is not None and (at["file"], at["line"]) == (line["file"], line["line"])

    places = [at for at, row in enumerate(rows) if is_named(row)]
    places = places or [at for at, row in enumerate(rows) if row["status"] not in RIGHT_STATUSES]
    first = places[0] if places else 0
    return rows[max(0, first - _AROUND) : first + _AROUND + 1]


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[table.TableColumn]:
    def of(side: str, key: str) -> list[str]:
        return [wording.clean(str(row[side][key])) if row[side] is not None else "" for row in rows]

    def line(side: str) -> list[str]:
        found = [None if row[side] is None else row[side]["line"] for row in rows]
        return ["" if each is None else f"{each['file'].rpartition('/')[2]}:{each['line']}" for each in found]

    errors = ["" if math.isnan(row["rel_l2"]) else "0" if not row["rel_l2"] else f"{row['rel_l2']:.1e}" for row in rows]
    return [
        table.TableColumn("", [_MARKS[row["status"]] for row in rows], styles=[_style(row) for row in rows]),
        table.TableColumn("reference", of("reference", "operator"), left=True, least=8),
        table.TableColumn("dtype", of("reference", "dtype"), left=True, optional=3, style="dim"),
        table.TableColumn("line", line("reference"), left=True, least=10, optional=4, style="dim"),
        table.TableColumn("candidate", of("candidate", "operator"), left=True, least=8, style="bold"),
        table.TableColumn("dtype ", of("candidate", "dtype"), left=True, optional=2),
        table.TableColumn("line ", line("candidate"), left=True, least=10, optional=1),
        table.TableColumn("rel err", errors),
    ]


def _style(row: Mapping[str, Any]) -> str:
    return _STYLES.get(row["status"], "")
