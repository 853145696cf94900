"""A folder of HDF5 dumps, opened as one run: a file for each epoch, step and rank.

dumps/0-epoch_3-step_dump.hdf5             epoch 0, step 3, rank 0
dumps/1-epoch_3-step_dump.rank2.hdf5       epoch 1, step 3, rank 2; counts as step 1000003 (see `dump_step`)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from tensortap.core.records import Record
from tensortap.errors import RunUnreadable
from tensortap.store.format import RUN_JSON
from tensortap.store.formats.entries import Summarize, few_notices
from tensortap.store.formats.hdf5.file import Hdf5File, dump_step
from tensortap.store.formats.hdf5.file import open_source as open_file
from tensortap.store.formats.hdf5.probe import find_damaged
from tensortap.store.index import Index
from tensortap.store.run import RunSource, reason_of
from tensortap.store.source import LocalFiles, kept_location

__all__ = ["Hdf5Folder", "open_source", "recognizes"]

_FILE = re.compile(
    r"(?P<prefix>.*?)[0-9]{1,18}-epoch_[0-9]{1,18}-step_dump(?:\.rank(?P<rank>[0-9]{1,9}))?\.(?:hdf5|h5|hdf)", re.DOTALL
)


class _DumpFile(NamedTuple):
    """A file of the folder."""

    name: str
    rank: int
    step: int
    dump: Hdf5File


def recognizes(path: Path) -> bool:
    """Return whether a folder has a file that is named as a dump."""
    if not path.is_dir() or (path / RUN_JSON).exists():
        return False
    return any(_FILE.fullmatch(entry.name) for entry in path.iterdir())


def open_source(path: Path, summarize: Summarize) -> Hdf5Folder:
    """Open all dumps of a folder as one run. Tensors are summarised when the records are first asked for."""
    found = sorted((match["prefix"], int(match["rank"] or 0), match[0]) for match in _names(path))
    prefixes = sorted({prefix for prefix, _, _ in found})
    if len(prefixes) > 1:
        raise RunUnreadable(
            f"{path} holds dumps of several runs, whose files begin with {prefixes[0]!r} and {prefixes[1]!r}: "
            "put each into a folder of its own, or open a single file."
        )
    files = LocalFiles(path)
    find_damaged([each for _, _, name in found if (each := path / name).is_file()])  # all of them in one process
    parts, damaged = [], []
    for _, rank, name in found:
        part = _opened(files, name, summarize)
        if isinstance(part, str):
            damaged.append(f"{name}: {part}")
        else:
            parts.append(_DumpFile(name, rank, dump_step(part.info.get("epoch"), part.info.get("step")), part))
    if not parts:
        raise RunUnreadable(f"{path}: none of its {len(found)} dumps can be read. {damaged[0]}")
    return Hdf5Folder(path, sorted(parts, key=lambda part: (part.rank, part.step)), damaged)


class Hdf5Folder(RunSource):
    """The dumps of one run; the dumps of a rank are ordered by step."""

    def __init__(self, path: Path, parts: Sequence[_DumpFile], damaged: Sequence[str]) -> None:
        for before, after in pairwise(parts):
            if (before.rank, before.step) == (after.rank, after.step):
                raise RunUnreadable(f"{path}: {before.name} and {after.name} are dumps of the same step and rank.")
        ranks = {part.rank for part in parts}
        known = {name: parts[0].dump.info.get(name) for name in ("framework", "model")}
        super().__init__(path, {"format": "hdf5 folder", "config": {}, "world": len(ranks), **known}, ranks)
        self._parts = parts
        self._by_name = {part.name: part.dump for part in parts}
        self._damaged = damaged

    def finished(self) -> bool:
        return not self._damaged and all(part.dump.finished() for part in self._parts)

    def unreadable(self) -> list[str]:
        return [*self._damaged, *(f"{part.name}: {name}" for part in self._parts for name in part.dump.unreadable())]

    def notices(self) -> list[str]:
        have = {(part.rank, part.step) for part in self._parts}
        wanted = ((rank, step) for rank in self.ranks for step in self.steps())
        missing = [f"rank {rank}, step {step}" for rank, step in wanted if (rank, step) not in have]
        found = few_notices("unreadable dumps", self._damaged)
        found += few_notices("missing dumps, of steps that other ranks have", missing)
        return found + [f"{part.name}: {notice}" for part in self._parts for notice in part.dump.notices()]

    def steps(self) -> list[int]:
        return sorted({part.step for part in self._parts})

    def read_index(self, rank: int) -> Index:
        tables: list[Any] = []
        for part in self._parts:
            if part.rank == rank:
                tables.append(_shifted(part, sum(table.num_rows for table in tables)))
        batches = [batch for table in tables for batch in table.to_batches()]
        return Index.of(batches, rank, complete=self.finished())

    def view(self, record: Record) -> memoryview:
        return self._part(record).view(_without_file(record))

    def read(self, record: Record) -> memoryview:
        return self._part(record).read(_without_file(record))

    def address(self, rank: int, file: str) -> str:
        return str(self.path / file.partition("/")[0])

    def close(self) -> None:
        super().close()
        for part in self._parts:
            part.dump.close()

    def _part(self, record: Record) -> Hdf5File:
        """Return the dump of a record: its name is the first part of the location."""
        return self._by_name[kept_location(record).file.partition("/")[0]]


def _without_file(record: Record) -> Record:
    location = kept_location(record)
    return replace(record, location=location._replace(file=location.file.partition("/")[2]))


def _names(path: Path) -> list[re.Match[str]]:
    return [match for entry in path.iterdir() if (match := _FILE.fullmatch(entry.name)) is not None]


def _opened(files: LocalFiles, name: str, summarize: Summarize) -> Hdf5File | str:
    """Return the dump, or why it cannot be opened."""
    try:
        files.size(name)  # refuses links that lead out of the folder
        dump = open_file(files.path(name), summarize)
    except Exception as error:  # a damaged file can make the library raise anything
        return reason_of(error)
    return dump if len(dump.ranks) == 1 else "it holds several ranks, as an export does: open it alone"


def _shifted(part: _DumpFile, rows_before: int) -> Any:
    """Return the rows of a part as rows of the run: with its step, and numbered after all earlier rows."""
    table = part.dump.index(part.dump.ranks[0]).rows
    columns = {
        "step": pa.array([part.step] * table.num_rows, pa.int64()),
        "seq": pc.add(table.column("seq"), rows_before),
        "tensor": pc.add(table.column("tensor"), rows_before),
        "file": pc.binary_join_element_wise(pa.scalar(part.name), table.column("file"), "/"),
    }
    for name, column in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(place), column)
    return table
