"""The manifest of an export: which file and name holds which tensor. A CSV, for spreadsheets and scripts.

Facts about the whole export (`about`) are a JSON object: `export.json` in a folder, or the comment of an .npz.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from tensortap.core import dtypes
from tensortap.core.csv_cells import guarded, unguarded
from tensortap.core.records import KINDS, PHASES, Key, Record
from tensortap.errors import RunUnreadable, shorten
from tensortap.store.format import utf8
from tensortap.store.run import Run
from tensortap.store.source import SingleFile

__all__ = ["ABOUT", "COLUMNS", "EXPORT", "MANIFEST", "Manifest", "ManifestRow", "about", "is_manifest", "read_manifest"]

MANIFEST = "manifest.csv"
ABOUT = "export.json"
EXPORT = "tensortap-export"
_LARGEST = (1 << 63) - 1
COLUMNS = ("file", "name", *Key._fields, "rank", "seq", "class", "dtype", "stored_dtype", "shape")


class Manifest:
    """Writes rows as they come, so that a million of them need no memory."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file)
        self._rows.writerow(COLUMNS)

    def add(self, file: str, name: str, record: Record, stored: str) -> None:
        row: list[Any] = [file, name, *record.key, record.rank, record.seq, record.cls, record.dtype, stored]
        row.append(json.dumps(record.shape))
        self._rows.writerow([guarded(utf8(cell)) if isinstance(cell, str) else cell for cell in row])

    def close(self) -> None:
        self._file.close()


class ManifestRow(NamedTuple):
    """A row of a manifest."""

    file: str
    name: str
    key: Key
    rank: int
    seq: int
    cls: str
    dtype: str
    """The dtype of the tensor."""
    stored: str
    """The dtype of the array in the file."""
    shape: tuple[int, ...]


def about(run: Run) -> dict[str, Any]:
    """Return the facts about a whole export."""
    names = {"framework": str(run.info.get("framework", "")), "model": str(run.info.get("model", ""))}
    return {"format": EXPORT, "version": 1, "complete": run.finished, **names}


def read_manifest(path: Path) -> Iterator[ManifestRow]:
    """Yield the rows of a manifest. Raise RunUnreadable at an invalid one."""
    with _opened(path) as file:
        rows = csv.reader(file)
        try:
            next(rows, None)
            for row in rows:
                yield _parse(row)
        except (OSError, ValueError, TypeError, RecursionError, csv.Error) as error:
            reason = shorten(" ".join(str(error).split()))
            raise RunUnreadable(f"{path}, line {rows.line_num}, is damaged: {reason}.") from error


def _opened(path: Path, errors: str = "strict") -> TextIOWrapper:
    return TextIOWrapper(SingleFile(path).stream(path.name), encoding="utf-8", errors=errors, newline="")


def _parse(row: list[str]) -> ManifestRow:
    if len(row) != len(COLUMNS):
        raise ValueError(f"it has {len(row)} columns instead of {len(COLUMNS)}")
    cells = dict(zip(COLUMNS, map(unguarded, row), strict=True))
    step, micro, call = (_number(cells[field]) for field in ("step", "micro", "call"))
    key = Key(step, micro, cells["phase"], cells["module"], call, cells["kind"], cells["path"])
    for word, known in ((key.kind, KINDS), (key.phase, PHASES), (cells["dtype"], dtypes.NAMES)):
        if word not in known:
            raise ValueError(f"{word[:40]!r} is not one of {', '.join(known)}")
    shape = json.loads(cells["shape"])
    if not isinstance(shape, list) or not all(type(length) is int and 0 <= length < _LARGEST for length in shape):
        raise ValueError(f"{cells['shape'][:40]!r} is not a shape")
    rank, seq = _number(cells["rank"], least=0), _number(cells["seq"])
    names = cells["class"], cells["dtype"], cells["stored_dtype"]
    return ManifestRow(cells["file"], cells["name"], key, rank, seq, *names, tuple(shape))


def _number(text: str, least: int = -_LARGEST) -> int:
    number = int(text)
    if not least <= number <= _LARGEST:
        raise ValueError(f"{text[:40]} is out of range")
    return number


def is_manifest(path: Path) -> bool:
    """Return whether a file is the manifest of an export."""
    try:
        with _opened(path, errors="replace") as file:
            return next(csv.reader(file), None) == list(COLUMNS)
    except (OSError, ValueError, csv.Error):
        return False
