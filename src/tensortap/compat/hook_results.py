"""Two folders of saved tensors in, a table and notes out: the numbers of the checker, and the files it writes.

{A}/tensors/compare_rst/rank_0_rst.csv     COLUMNS, a row for each file that both sides have
{A}/tensors/compare_rst/rank_0_notes.csv   NOTE_COLUMNS: what those columns cannot say
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap import dtypes
from tensortap.errors import StoreWriteError
from tensortap.kernels.pairs import Side, difference
from tensortap.report import output
from tensortap.store.formats.npy_names import NpyName, files_in

__all__ = ["COLUMNS", "NOTE_COLUMNS", "Note", "RankResult", "Row", "compare_rank", "pairs_of", "write"]

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
"""In the order of COLUMNS: the name, then numbers."""
Pairs = list[tuple[str, str]]
Files = Sequence[tuple[str, NpyName | None]]
_COUNTER = re.compile(r"_[0-9]+(?=[._@]|$)")


class Note(NamedTuple):
    """In the order of NOTE_COLUMNS."""

    name: str
    note: str
    """only in A | only in B | paired by name | paired by order | shape | dtype | complex | not finite | zero norm |
    unreadable, with the reason on the side whose file it is"""
    a: str = ""
    b: str = ""


@dataclass(slots=True)
class RankResult:
    """What came out for one rank of the tensors or of the gradients."""

    kind: str
    rank: int
    rows: list[Row] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def count(self, note: str) -> int:
        return sum(each.note == note for each in self.notes)


def pairs_of(folder_a: Path, folder_b: Path) -> tuple[Pairs, list[Note]]:
    """The files that are held against each other, in A's order, and notes on the others and on names that differ.

    Paddle numbers its layers over the whole process, so two models built in one process share no name. Where nothing at
    all is common, files are paired that have the same index and the same name but for such numbers.
    """
    a, b = files_in(folder_a), files_in(folder_b)
    pairs, how = _by_name(a, b), "paired by name"
    if not {file for file, _ in a} & {file for file, _ in b}:
        # By order only if that finds more: a layer called `conv_1` may have lost its neighbour, and is no `conv_2`.
        by_order = _by_order(a, b)
        if len(by_order) > len(pairs):
            pairs, how = by_order, "paired by order"
    notes = [Note(ours, how, ours, theirs) for ours, theirs in pairs if ours != theirs]
    paired_a, paired_b = {ours for ours, _ in pairs}, {theirs for _, theirs in pairs}
    notes += [Note(file, "only in A") for file, _ in a if file not in paired_a]
    notes += [Note(file, "only in B") for file, _ in b if file not in paired_b]
    return pairs, notes


def compare_rank(
    result: RankResult, folder_a: Path, folder_b: Path, pairs: Pairs, done: Callable[[], None]
) -> RankResult:
    """Measure every pair; `done` is called after each."""
    for name_a, name_b in pairs:
        a, b = _load(folder_a / name_a), _load(folder_b / name_b)
        if isinstance(a, str) or isinstance(b, str):
            result.notes.append(Note(name_a, "unreadable", *(side if isinstance(side, str) else "" for side in (a, b))))
        elif a.shape != b.shape:
            result.notes.append(Note(name_a, "shape", str(a.shape), str(b.shape)))
        elif (a.dtype.kind == "c") != (b.dtype.kind == "c"):
            result.notes.append(Note(name_a, "complex", str(a.dtype), str(b.dtype)))
        else:
            _measure(result, name_a, a, b)
        done()
    return result


def write(folder: Path, result: RankResult) -> Path:
    """Both files of a rank; the path of the first."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreWriteError(f"{folder} cannot be made: {error.strerror}") from error
    path = folder / f"rank_{result.rank}_rst.csv"
    _write_csv(path, COLUMNS, result.rows)
    _write_csv(folder / f"rank_{result.rank}_notes.csv", NOTE_COLUMNS, result.notes)
    return path


def _by_name(a: Files, b: Files) -> Pairs:
    """Files of equal names; and those that are the n-th of the same layer, place and micro step on both sides.

    The number in a name counts all files of the run: a call that only one side has, as of an expert that gets no
    tokens, moves the numbers of all that follow.
    """
    in_b = {file for file, _ in b}
    found = {file: file for file, _ in a if file in in_b}
    calls_b = _calls(b)
    for call, ours in _calls(a).items():
        theirs = calls_b.get(call, [])
        if len(ours) == len(theirs):  # equal numbers are chance if a layer is called again and again behind a gap
            found.update(zip(ours, theirs, strict=True))
            continue
        same = {*ours} & {*theirs}
        found.update((x, y) for x, y in zip(ours, theirs, strict=False) if x not in same and y not in same)
    return [(file, found[file]) for file, _ in a if file in found]


def _calls(files: Files) -> dict[NpyName, list[str]]:
    """Files by what their names say, but for the running number."""
    found: dict[NpyName, list[str]] = defaultdict(list)
    for file, name in files:
        if name is not None:
            found[name._replace(number=0)].append(file)
    return found


def _by_order(a: Files, b: Files) -> Pairs:
    waiting = {_without_counters(name): file for file, name in b if name is not None}
    return [(file, waiting[key]) for file, name in a if name and (key := _without_counters(name)) in waiting]


def _without_counters(name: NpyName) -> NpyName:
    return name._replace(name=_COUNTER.sub("_#", name.name))


def _load(path: Path) -> npt.NDArray[Any] | str:
    """The tensor; or why it cannot be read, or not be measured."""
    try:
        with path.open("rb") as file:  # and not np.load, which takes an archive of arrays for a file of one
            array: npt.NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    try:
        dtypes.name_of(array.dtype)
    except KeyError:
        return f"elements of dtype {array.dtype} cannot be compared; known are {', '.join(dtypes.NAMES)}"
    return array


def _measure(result: RankResult, name: str, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
    measure = difference(a, b, size=0.0)  # what that is for, the worst row, is not in the files
    sides = measure.reference, measure.candidate
    finite = all(_bad(side) == 0 for side in sides)
    cosine = measure.difference.cosine if finite else math.nan
    numbers = zip(_moments(a, sides[0]), _moments(b, sides[1]), strict=True)
    result.rows.append((name, cosine, *(value for x, y in numbers for value in (x, y, x - y))))
    if a.dtype != b.dtype:
        result.notes.append(Note(name, "dtype", str(a.dtype), str(b.dtype)))
    if not finite:
        result.notes.append(Note(name, "not finite", *(f"{s.nan} nan, {s.inf} inf" for s in sides)))
    elif not all(side.l2 for side in sides):
        result.notes.append(Note(name, "zero norm", *("yes" if side.l2 == 0 else "no" for side in sides)))


def _moments(array: npt.NDArray[Any], side: Side) -> tuple[float, float, float]:
    """Mean, std, var as NumPy has them: one NaN or infinity is not passed over but shows."""
    if not _bad(side):
        # Normalised tensors have a mean of next to nothing, of which people compare every digit: the kernel's error,
        # though small beside the elements, would show in it. A plain sum of so few bits is mostly exact.
        plain = array.size and array.dtype.kind in "fiub"
        return float(np.mean(array, dtype=np.float64)) if plain else side.mean, side.std, side.var
    if side.nan or (side.posinf and side.neginf):
        return math.nan, math.nan, math.nan
    return math.inf if side.posinf else -math.inf, math.nan, math.nan


def _bad(side: Side) -> int:
    return side.nan + side.inf


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    table.writerows(rows)
    with output.opened(path) as file:
        file.writelines(output.encoded([text.getvalue()]))
