"""Compare two folders of saved tensors: the numbers of the checker, and the files that it writes.

{A}/tensors/compare_rst/rank_0_rst.csv     COLUMNS, a row for each file that both sides have
{A}/tensors/compare_rst/rank_0_notes.csv   NOTE_COLUMNS, a row for each remark on a file
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core.csv_cells import guarded
from tensortap.errors import RunUnreadable, StoreWriteError
from tensortap.kernels.pairs.cpu import SideMeasure, difference
from tensortap.report.files import output
from tensortap.store.formats.npy.file import read_npy
from tensortap.store.formats.npy.pairs import pair_files
from tensortap.store.formats.npy.sidecar import read_sidecar

__all__ = ["COLUMNS", "NOTE_COLUMNS", "PairNote", "RankResult", "Row", "compare_rank", "pair_rank", "write"]

COLUMNS = (
    "tensor_name",
    "cosine similarity",
    "meanA",
    "meanB",
    "meanA - meanB",
    "stdA",
    "stdB",
    "stdA - stdB",
    "varA",
    "varB",
    "varA - varB",
)
NOTE_COLUMNS = ("tensor_name", "note", "A", "B")

Row = tuple[Any, ...]
"""The name, then numbers, in the order of COLUMNS."""
Pairs = list[tuple[str, str]]


class PairNote(NamedTuple):
    """A remark on a file or pair, in the order of NOTE_COLUMNS."""

    name: str
    note: str
    """only in A | only in B | paired by name | paired by order | shape | dtype | complex | not finite | zero norm |
    unreadable, with the reason on the side whose file it is"""
    a: str = ""
    b: str = ""


@dataclass(slots=True)
class RankResult:
    """The result for one rank of the tensors or of the gradients."""

    kind: str
    rank: int
    rows: list[Row] = field(default_factory=list)
    notes: list[PairNote] = field(default_factory=list)

    def count(self, note: str) -> int:
        return sum(each.note == note for each in self.notes)


def pair_rank(folder_a: Path, folder_b: Path) -> tuple[Pairs, list[PairNote]]:
    """Return the files to compare, in A's order, and notes on the others and on names that differ."""
    pairs, how, only_a, only_b = pair_files(folder_a, folder_b)
    notes = [PairNote(in_a, how, in_a, in_b) for in_a, in_b in pairs if in_a != in_b]
    notes += [PairNote(file, "only in A") for file in only_a]
    notes += [PairNote(file, "only in B") for file in only_b]
    return pairs, notes


def compare_rank(
    result: RankResult, folder_a: Path, folder_b: Path, pairs: Pairs, done: Callable[[], None]
) -> RankResult:
    """Measure every pair, and call `done` after each."""
    dtypes_a, dtypes_b = (_recorded_dtypes(folder, result.rank) for folder in (folder_a, folder_b))
    for name_a, name_b in pairs:
        a, b = _load(folder_a / name_a), _load(folder_b / name_b)
        if isinstance(a, str) or isinstance(b, str):
            result.notes.append(
                PairNote(name_a, "unreadable", *(side if isinstance(side, str) else "" for side in (a, b)))
            )
        elif a.shape != b.shape:
            result.notes.append(PairNote(name_a, "shape", str(a.shape), str(b.shape)))
        elif (a.dtype.kind == "c") != (b.dtype.kind == "c"):
            result.notes.append(PairNote(name_a, "complex", str(a.dtype), str(b.dtype)))
        else:
            _measure(result, name_a, a, b)
            in_a, in_b = dtypes_a.get(name_a, str(a.dtype)), dtypes_b.get(name_b, str(b.dtype))
            if in_a != in_b:
                result.notes.append(PairNote(name_a, "dtype", in_a, in_b))
        done()
    return result


def write(folder: Path, result: RankResult) -> Path:
    """Write both files of a rank; return the path of the first."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreWriteError(
            f"{folder} cannot be created: {error.strerror}; the results are written below the first path, which must "
            "be writable"
        ) from error
    path = folder / f"rank_{result.rank}_rst.csv"
    _write_csv(path, COLUMNS, result.rows)
    _write_csv(folder / f"rank_{result.rank}_notes.csv", NOTE_COLUMNS, result.notes)
    return path


def _recorded_dtypes(folder: Path, rank: int) -> dict[str, str]:
    """Return the dtypes that the tensors of a rank's folder had in the model, as far as they are recorded."""
    tree, kind = folder.parent.parent, folder.parent.name
    entries = read_sidecar(tree, rank).entries.items()
    return {file.removeprefix(f"{kind}/"): entry.dtype for file, entry in entries if file.startswith(f"{kind}/")}


def _load(path: Path) -> npt.NDArray[Any] | str:
    """Return the tensor, or the reason why it cannot be read or measured."""
    try:
        return read_npy(path)
    except RunUnreadable as error:
        return str(error)


def _measure(result: RankResult, name: str, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
    measure = difference(a, b, size=0.0)  # the size only matters for the worst row, which the tables do not have
    sides = measure.reference, measure.candidate
    finite = all(_nonfinite_count(side) == 0 for side in sides)
    cosine = measure.difference.cosine if finite else math.nan
    numbers = zip(_moments(a, sides[0]), _moments(b, sides[1]), strict=True)
    result.rows.append((name, cosine, *(value for x, y in numbers for value in (x, y, x - y))))
    if not finite:
        result.notes.append(PairNote(name, "not finite", *(f"{s.nan} nan, {s.inf} inf" for s in sides)))
    elif not all(side.l2 for side in sides):
        result.notes.append(PairNote(name, "zero norm", *("yes" if side.l2 == 0 else "no" for side in sides)))


def _moments(array: npt.NDArray[Any], side: SideMeasure) -> tuple[float, float, float]:
    """Return mean, std and var as NumPy computes them: NaN and infinity propagate."""
    if not _nonfinite_count(side):
        # Normalised tensors have a mean near zero, and users compare all its digits. The kernel's error is small
        # compared with the elements but would show there; a plain float64 sum is mostly exact.
        plain = array.size and array.dtype.kind in "fiub"
        return float(np.mean(array, dtype=np.float64)) if plain else side.mean, side.std, side.var
    if side.nan or (side.posinf and side.neginf):
        return math.nan, math.nan, math.nan
    return math.inf if side.posinf else -math.inf, math.nan, math.nan


def _nonfinite_count(side: SideMeasure) -> int:
    return side.nan + side.inf


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    table.writerows([guarded(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    with output.opened(path) as file:
        file.writelines(output.encoded([text.getvalue()]))
