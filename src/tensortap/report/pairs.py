"""Pairs of a comparison for people: which rows to show, and their text.

Every report takes its rows from here, so that all reports use the same words. Rows are dicts with the columns of
`Comparison.table`; an unknown number is None there, and NaN as `value` returns it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tensortap.core.records import WRONG_STATUSES, Comparison, Finding, display_name
from tensortap.report.wording import apart, born_in, clean, count, percent, rough, shape

__all__ = [
    "GLYPHS",
    "WRONG_STATUSES",
    "around",
    "bad_rows",
    "detail",
    "error",
    "greatest",
    "index",
    "nearest",
    "nonfinite",
    "place",
    "row_at",
    "rows_of",
    "share",
    "status_text",
    "tally",
    "ulps",
    "value",
    "worst_row",
]

Row = Mapping[str, Any]

GLYPHS = {
    "equal": "=",
    "close": "≈",
    "diverged": "✖",
    "nonfinite": "✖",
    "shape": "✖",
    "unjudged": "?",
    "unmatched": "∅",
}
_WORDS = {"nonfinite": "NaN or Inf", "shape": "of another shape", "unjudged": "not judged"}
_BIRTHS = {"nonfinite": "NaN born here", "shape": "shape born here"}
_SHAPES = ("shape_reference", "shape_candidate")
_JUDGED = (("rel_l2", "tolerance"), ("row_rel_l2", "row_tolerance"))


# --- which rows ----------------------------------------------------------------------------------------------------
def place(comparison: Comparison, finding: Finding | None) -> int | None:
    """Return the number of a finding's row in the table; None if only one side has the record."""
    return None if finding is None else finding.row


def around(comparison: Comparison, at: int, before: int, after: int) -> list[int]:
    """Return the row `at` and its neighbours on the same rank; rows missing before are added after, and vice versa."""
    ranks = comparison.table.column("rank").to_numpy()
    same = np.flatnonzero(ranks == ranks[at])
    here = int(np.searchsorted(same, at))
    missing_before, missing_after = max(0, before - here), max(0, here + after + 1 - len(same))
    first, last = max(0, here - before - missing_after), here + after + missing_before
    return [int(row) for row in same[first : last + 1]]


def nearest(comparison: Comparison, most: int) -> list[int]:
    """Return the rows whose error is the largest share of their tolerance; equal pairs are left out."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.fmax(*(_of_allowed(comparison, *names) for names in _JUDGED))
    order = np.argsort(-np.nan_to_num(ratio, nan=0.0, posinf=np.finfo(np.float64).max), kind="stable")[:most]
    return [int(row) for row in order if ratio[row] > 0]


def bad_rows(comparison: Comparison, most: int | None = None) -> list[int]:
    """Return the rows that failed, in execution order."""
    failed = pc.is_in(comparison.table.column("status"), value_set=pa.array(WRONG_STATUSES))
    return [int(row) for row in np.flatnonzero(failed.to_numpy(zero_copy_only=False))[:most]]


def rows_of(comparison: Comparison, places: Sequence[int]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = comparison.table.take(pa.array(places, pa.int64())).to_pylist()
    return found


def row_at(comparison: Comparison, at: int) -> dict[str, Any]:
    return rows_of(comparison, [at])[0]


def _of_allowed(comparison: Comparison, error: str, allowed: str) -> npt.NDArray[np.float64]:
    """Return errors as shares of their tolerance."""
    errors = _numbers(comparison, error)
    return np.where(errors > 0, errors / _numbers(comparison, allowed), 0.0)


def _numbers(comparison: Comparison, name: str) -> npt.NDArray[np.float64]:
    return np.asarray(comparison.table.column(name).to_numpy(), np.float64)


# --- their words ---------------------------------------------------------------------------------------------------
def value(row: Row, name: str) -> float:
    """Return a number of a row; NaN if it is unknown."""
    found = row.get(name)
    return math.nan if found is None else float(found)


def error(row: Row) -> str:
    """Return the relative error; an estimate has a ~ and its error bar: "4.1e-3", "~4.1e-3 ±7%"."""
    size = value(row, "rel_l2")
    if row["status"] == "equal":
        return "0"
    if row["status"] == "nonfinite":
        return "–"  # the error of the finite elements may be 0, which would mislead
    if row.get("exact", True) is not False or math.isnan(size):
        return rough(size)
    bar = value(row, "rel_l2_bar")
    if math.isinf(bar) and math.isfinite(size):
        return f"≥{rough(size)}"  # only norms are known, which bound the error from below
    if math.isnan(bar):
        return f"~{rough(size)}"
    return f"~{rough(size)} ±" + (f"{100 * bar / size:.0f}%" if bar < size else rough(bar))


def greatest(row: Row) -> str:
    """Return the greatest absolute difference."""
    size = value(row, "max_abs")
    return "" if math.isnan(size) or row["status"] in ("equal", "nonfinite") else rough(size)


def index(row: Row) -> str:
    """Return the index of the greatest difference: "0,3,17"."""
    found = row.get("max_abs_index")
    return ",".join(map(str, found)) if found and row["status"] != "equal" else ""


def worst_row(row: Row) -> str:
    """Return the error of the worst row along the last dimension if it exceeds that of the whole tensor: "0.41"."""
    size = value(row, "row_rel_l2")
    worse = row.get("row_index") and size > value(row, "rel_l2") and row["status"] in ("close", "diverged")
    return rough(size) if worse else ""


def detail(row: Row) -> str:
    """Describe a pair beyond its relative error."""
    parts = []
    if row.get("container") is not None:
        parts.append(born_in(row["cause"], row["container"]))
    if row["status"] == "shape":
        sizes = ["unknown" if row.get(name) is None else shape(row[name]) for name in _SHAPES]
        parts.append("{} in the reference, {} in the candidate".format(*sizes))
    if row["status"] == "nonfinite":
        parts.append(f"candidate: {nonfinite(row, 'candidate')}, reference: {nonfinite(row, 'reference')}")
    parts += _mapped(row)
    if where := index(row):
        ours, theirs = apart(value(row, "candidate_value"), value(row, "reference_value"))
        parts.append(f"{ours} instead of {theirs} at index {where}")
    if (off := share(row)) not in ("", "0%"):
        parts.append(f"{off} of elements off")
    if not math.isnan(ulp := value(row, "max_ulp")) and row["status"] == "diverged":
        parts.append(f"{ulps(ulp)} ULP")
    if row["status"] == "diverged" and (worst := worst_row(row)):
        parts.append(f"row {','.join(map(str, row['row_index']))} alone off by {worst}")
    return "; ".join(parts)


def _mapped(row: Row) -> list[str]:
    """Return the candidate's name and tensor layout where they differ from the reference's."""
    found = []
    if (module := row.get("module_candidate")) is not None:
        found.append(f"{clean(display_name(module))} in the candidate")
    if (layout := row.get("layout")) is not None:
        ours, theirs = (shape(row[name]) for name in _SHAPES)
        found.append(f"{ours} here, {theirs} there: {clean(layout)}")
    return found


def ulps(ulp: float) -> str:
    return "" if math.isnan(ulp) else rough(ulp) if ulp >= 1000 else f"{ulp:.0f}"


def status_text(row: Row) -> str:
    """Return the status as a sign and a word: "≈ close", "✖ diverged", "✖ 12 NaN"; at a birth, "✖ born here ◀"."""
    status, glyph = row["status"], GLYPHS.get(row["status"], "?")
    if row.get("birth"):
        return f"{glyph} {_BIRTHS.get(status, 'born here')} ◀"
    if status == "nonfinite":
        found = nonfinite(row, "candidate")
        return f"{glyph} {found}" if found != "none" else f"{glyph} no {nonfinite(row, 'reference').split()[-1]}"
    return f"{glyph} {clean(status)}"


def nonfinite(row: Row, side: str) -> str:
    """Return the non-finite elements of one side: "12 NaN", "3 NaN 2 Inf", "none"."""
    counted = (("NaN", row.get(f"nan_{side}")), ("Inf", row.get(f"inf_{side}")))
    return " ".join(f"{count(n)} {word}" for word, n in counted if n) or "none"


def tally(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return each status that occurs with its text: ("close", "≈ 310 close")."""
    known = [name for name in GLYPHS if counts.get(name)]
    known += [name for name in counts if name not in GLYPHS and counts[name]]
    return [(name, f"{GLYPHS.get(name, '?')} {count(counts[name])} {_WORDS.get(name, clean(name))}") for name in known]


def share(row: Row) -> str:
    """Return the share of elements outside the tolerance."""
    mismatched = value(row, "mismatched")
    return "" if math.isnan(mismatched) else percent(mismatched)
