"""The manifest of an export: which file and name holds which tensor. A CSV, for spreadsheets and scripts alike."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from tensortap.records import Key, Record
from tensortap.store.format import utf8

__all__ = ["COLUMNS", "MANIFEST", "Manifest", "is_manifest"]

MANIFEST = "manifest.csv"
COLUMNS = ("file", "name", *Key._fields, "rank", "seq", "class", "dtype", "stored_dtype", "shape")


class Manifest:
    """Rows are written as they come, so that a million of them need no memory."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file)
        self._rows.writerow(COLUMNS)

    def add(self, file: str, name: str, record: Record, stored: str) -> None:
        row: list[Any] = [file, name, *record.key, record.rank, record.seq, record.cls, record.dtype, stored]
        row.append(json.dumps(record.shape))
        self._rows.writerow([utf8(cell) if isinstance(cell, str) else cell for cell in row])

    def close(self) -> None:
        self._file.close()


def is_manifest(path: Path) -> bool:
    """Whether an export has left this file."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return next(csv.reader(file), None) == list(COLUMNS)
    except (OSError, ValueError, csv.Error):
        return False
