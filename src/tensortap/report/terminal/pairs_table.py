"""Pairs as aligned columns for the terminal: names, errors and status."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tensortap.core.records import display_name
from tensortap.report import pairs
from tensortap.report.terminal.table import TableColumn
from tensortap.report.wording import clean, dtype, rough, shape

__all__ = ["STYLES", "columns_of"]

Row = Mapping[str, Any]

STYLES = {
    "equal": "green",
    "close": "green",
    "diverged": "red",
    "nonfinite": "magenta",
    "shape": "red",
    "unjudged": "yellow",
    "unmatched": "yellow",
}


def columns_of(rows: Sequence[Row], ranks: int = 1) -> list[TableColumn]:
    """Return all columns in order. A column without a value is left out; the layout drops those that do not fit."""
    styles = [_style(row) for row in rows]
    result = []
    if len({row["step"] for row in rows}) > 1:
        result.append(TableColumn("step", [str(row["step"]) for row in rows]))
    if ranks > 1:
        result.append(TableColumn("rank", [str(row["rank"]) for row in rows]))
    modules = [clean(display_name(row["module"])) for row in rows]
    result.append(
        TableColumn("module", modules, left=True, least=24, styles=["bold" * bool(row["birth"]) for row in rows])
    )
    result.append(TableColumn("class", [clean(row["cls"]) for row in rows], left=True, optional=7))
    if any(row["phase"] == "eval" for row in rows):
        result.append(TableColumn("phase", [row["phase"] for row in rows], left=True))
    counters = [name for name in ("micro", "call") if any(row[name] for row in rows)]
    result += [TableColumn(name, [str(row[name]) for row in rows]) for name in counters]
    tensors = [clean(f"{row['kind']} {row['path']}") for row in rows]
    result.append(TableColumn("tensor", tensors, left=True, least=13))
    result.append(TableColumn("rel err", [pairs.error(row) for row in rows]))
    further = [
        TableColumn("allowed", [rough(pairs.value(row, "tolerance")) for row in rows], optional=2),
        TableColumn("max abs", [pairs.greatest(row) for row in rows]),
        TableColumn("at index", [pairs.index(row) for row in rows], left=True, optional=1),
        TableColumn("mismatched", [pairs.share(row) for row in rows], optional=4),
        TableColumn("worst row", [pairs.worst_row(row) for row in rows], optional=6),
        TableColumn("1-cos", [_distance(row) for row in rows], optional=3),
        TableColumn("ULP", [pairs.ulps(pairs.value(row, "max_ulp")) for row in rows], optional=5),
        TableColumn("dtype", [_both(row, "dtype") for row in rows], left=True, optional=8),
        TableColumn("shape", [_both(row, "shape") for row in rows], left=True, optional=9),
    ]
    result += [column for column in further if any(cell.strip("–") for cell in column.cells)]
    return [*result, TableColumn("status", [pairs.status_text(row) for row in rows], left=True, styles=styles)]


def _style(row: Row) -> str:
    style = STYLES.get(row["status"], "")
    return f"bold {style}" if row["birth"] else style


def _distance(row: Row) -> str:
    cosine = pairs.value(row, "cosine")
    return "" if math.isnan(cosine) else rough(max(0.0, 1 - cosine))


def _both(row: Row, name: str) -> str:
    """Return the common value of both sides, or both values."""
    sides = [row[f"{name}_{side}"] for side in ("reference", "candidate")]
    words = [("?" if v is None else shape(v)) if name == "shape" else dtype(clean(v)) for v in sides]
    return words[0] if words[0] == words[1] else f"{words[0]}/{words[1]}"
