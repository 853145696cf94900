"""A folder of HDF5 dumps, opened as one run: a file for each epoch, step and rank.

dumps/0-epoch_3-step_dump.hdf5             epoch 0, step 3, rank 0
dumps/1-epoch_3-step_dump.rank2.hdf5       epoch 1, step 3, rank 2; counts as step 1000003 (see `dump_step`)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from tensortap.core.records import Record
from tensortap.errors import RunNotFound, RunUnreadable
from tensortap.store.format import RUN_JSON
from tensortap.store.formats.entries import Summarize, few_notices
from tensortap.store.formats.hdf5.file import Hdf5Run, dump_step, open_hdf5
from tensortap.store.index import Index
from tensortap.store.run import Run
from tensortap.store.source import Spans

__all__ = ["Hdf5Folder", "is_hdf5_folder", "open_hdf5_folder"]

_FILE = re.compile(
    r"(?P<prefix>.*?)[0-9]{1,18}-epoch_[0-9]{1,18}-step_dump(?:\.rank(?P<rank>[0-9]{1,9}))?\.(?:hdf5|h5|hdf)", re.DOTALL
)


class _Part(NamedTuple):
    """A file of the folder."""

    name: str
    rank: int
    step: int
    run: Hdf5Run


def is_hdf5_folder(path: Path) -> bool:
    if not path.is_dir() or (path / RUN_JSON).exists():
        return False
    return any(_FILE.fullmatch(entry.name) for entry in path.iterdir())


def open_hdf5_folder(path: Path, summarize: Summarize) -> Hdf5Folder:
    """Open all dumps of a folder as one run. Tensors are summarised when the records are first asked for."""
    found = sorted((said["prefix"], int(said["rank"] or 0), said[0]) for said in _names(path))
    prefixes = sorted({prefix for prefix, _, _ in found})
    if len(prefixes) > 1:
        raise RunUnreadable(
            f"{path} holds dumps of several runs, whose files begin with {prefixes[0]!r} and {prefixes[1]!r}: "
            "put each into a folder of its own, or open a single file."
        )
    parts, damaged = [], []
    for _, rank, name in found:
        part = _opened(path / name, summarize)
        if isinstance(part, str):
            damaged.append(f"{name}: {part}")
        else:
            parts.append(_Part(name, rank, dump_step(part.info.get("epoch"), part.info.get("step")), part))
    if not parts:
        raise RunUnreadable(f"{path}: none of its {len(found)} dumps can be read. {damaged[0]}")
    return Hdf5Folder(path, sorted(parts, key=lambda part: (part.rank, part.step)), damaged)


class Hdf5Folder(Run):
    """A run over dumps. Those of one rank follow each other by their steps."""

    on_disk = False

    def __init__(self, path: Path, parts: Sequence[_Part], damaged: Sequence[str]) -> None:
        for before, after in pairwise(parts):
            if (before.rank, before.step) == (after.rank, after.step):
                raise RunUnreadable(f"{path}: {before.name} and {after.name} are dumps of the same step and rank.")
        ranks = sorted({part.rank for part in parts})
        said = {name: parts[0].run.info.get(name) for name in ("framework", "model")}
        super().__init__(path, {"format": "hdf5 folder", "config": {}, "world": len(ranks), **said}, ranks)
        self._parts = parts
        self._damaged = damaged
        self._spans = _FolderBytes(path, {part.name: part.run for part in parts})

    @property
    def finished(self) -> bool:
        return not self._damaged and all(part.run.finished for part in self._parts)

    @cached_property
    def notices(self) -> list[str]:
        have = {(part.rank, part.step) for part in self._parts}
        wanted = ((rank, step) for rank in self.ranks for step in self.steps)
        missing = [f"rank {rank}, step {step}" for rank, step in wanted if (rank, step) not in have]
        found = few_notices("unreadable dumps", self._damaged)
        found += few_notices("missing dumps, of steps that other ranks have", missing)
        return found + [f"{part.name}: {notice}" for part in self._parts for notice in part.run.notices]

    @cached_property
    def steps(self) -> list[int]:
        return sorted({part.step for part in self._parts})

    def close(self) -> None:
        for part in self._parts:
            part.run.close()
        super().close()

    def _index(self, rank: int) -> Index:
        if rank not in self.ranks:
            raise RunNotFound(f"{self.path} has no rank {rank}; it has {', '.join(map(str, self.ranks[:8]))}.")
        if rank not in self._indexes:
            tables: list[Any] = []
            for part in self._parts:
                if part.rank == rank:
                    tables.append(_moved(part, sum(table.num_rows for table in tables)))
            batches = [batch for table in tables for batch in table.to_batches()]
            self._indexes[rank] = Index.of(batches, rank, complete=self.finished)
        return self._indexes[rank]


class _FolderBytes(Spans):
    """Bytes of the parts: the index has the name of the file before what the part's own index says."""

    def __init__(self, path: Path, parts: dict[str, Hdf5Run]) -> None:
        super().__init__(path)
        self._parts = parts

    def view(self, record: Record) -> memoryview:
        return self._part(record).bytes_of(self._inner(record))

    def read(self, record: Record) -> memoryview:
        return memoryview(bytearray(self.view(record))).toreadonly()

    def path_of(self, rank: int, name: str) -> Path:
        return self._path / name.partition("/")[0]

    def _part(self, record: Record) -> Hdf5Run:
        self._where(record)
        assert record.location is not None
        return self._parts[record.location.file.partition("/")[0]]

    def _inner(self, record: Record) -> Record:
        assert record.location is not None
        return replace(record, location=record.location._replace(file=record.location.file.partition("/")[2]))


def _names(path: Path) -> list[re.Match[str]]:
    return [said for entry in path.iterdir() if (said := _FILE.fullmatch(entry.name)) is not None]


def _opened(path: Path, summarize: Summarize) -> Hdf5Run | str:
    """The dump, or why it cannot be opened."""
    try:
        run = open_hdf5(path, summarize)
    except RunUnreadable as error:
        return str(error)
    return run if len(run.ranks) == 1 else "it holds several ranks, as an export does: open it by itself"


def _moved(part: _Part, rows_before: int) -> Any:
    """The index of a part as the index of the run has it: its step, behind all rows before it."""
    table = part.run.index(part.run.ranks[0])
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
