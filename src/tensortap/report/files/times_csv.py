"""Times by module as CSV: a header and one row for each module and phase, with the keys of the JSON as columns.

Times are in microseconds, memory in bytes, shares from 0 to 1. A ratio that does not exist is empty. Text that a
spreadsheet might run as a formula begins with a ': `core.csv_cells` says which.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any, BinaryIO

from tensortap.core.csv_cells import guarded

__all__ = ["write"]


def write(facts: Mapping[str, Any], file: BinaryIO) -> None:
    """Write the rows of one profile, or of two that are compared."""
    text = io.TextIOWrapper(file, "utf-8", errors="backslashreplace", newline="")
    rows = facts["rows"]
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(_cells, rows))
    text.flush()
    text.detach()  # the file is the caller's


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: guarded(value) if isinstance(value, str) else value for name, value in row.items()}
