"""The formats of an export. Each writes the records of one step of one rank, and loads one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from tensortap.core import dtypes
from tensortap.core.records import Record, display_name
from tensortap.store.exports.hdf5_file import create_file, link_name, put, set_attributes
from tensortap.store.exports.manifest import ABOUT, MANIFEST, Manifest, about
from tensortap.store.exports.names import Unique, folder_of, leaf_of, pass_of, title_of
from tensortap.store.exports.npz_file import NpzWriter
from tensortap.store.exports.plain import widen, write_npy
from tensortap.store.format import rank_name
from tensortap.store.run import Run
from tensortap.store.writer.header import Header, room_for

__all__ = ["WRITERS", "Advance", "ExportWriter"]

Advance = Callable[[Record], None]
"""Called after each tensor."""


class ExportWriter(Protocol):
    """One export, at a temporary path until it is complete."""

    def step(self, run: Run, records: Sequence[Record], advance: Advance) -> None:
        """Write the records of one rank and step, in execution order."""

    def close(self) -> None: ...


class NpyExport:
    """A folder: rank, step, module, and one .npy a tensor."""

    def __init__(self, path: Path, run: Run, ranks: Sequence[int]) -> None:
        self._path = path
        self._manifest = _new_folder(path, run)

    def step(self, run: Run, records: Sequence[Record], advance: Advance) -> None:
        unique = Unique()
        for record in records:
            name = unique("/".join((*folder_of(record), leaf_of(record.key)))) + ".npy"
            file = self._path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            array = widen(run.load(record))
            with file.open("xb") as stream:
                write_npy(stream, array)
            self._manifest.add(name, "", record, dtypes.name_of(array.dtype))
            advance(record)

    def close(self) -> None:
        self._manifest.close()


class NpzExport:
    """One .npz. Its manifest is a separate file, since numpy.load expects arrays only."""

    def __init__(self, path: Path, run: Run, ranks: Sequence[int]) -> None:
        self._archive = NpzWriter(path, about(run))
        self._manifest = Manifest(path.with_name(path.name + MANIFEST))

    def step(self, run: Run, records: Sequence[Record], advance: Advance) -> None:
        unique = Unique()
        for record in records:
            name = unique("/".join((*folder_of(record), leaf_of(record.key))))
            stored = self._archive.add(name, run.load(record))
            self._manifest.add("", name, record, stored)
            advance(record)

    def close(self) -> None:
        self._manifest.close()
        self._archive.close()


class SafetensorsExport:
    """A folder with one .safetensors a step: all dtypes as they are."""

    def __init__(self, path: Path, run: Run, ranks: Sequence[int]) -> None:
        self._path = path
        self._several = len(ranks) > 1
        self._manifest = _new_folder(path, run)

    def step(self, run: Run, records: Sequence[Record], advance: Advance) -> None:
        name = f"step_{records[0].key.step:06d}.safetensors"
        if self._several:
            name = f"{rank_name(records[0].rank)}/{name}"
            (self._path / name).parent.mkdir(exist_ok=True)
        header = Header(sum(room_for(title_of(r.key), r.dtype, r.shape, 1 << 60) for r in records))
        end = 0
        for record in records:
            begin, end = end, end + (record.location.nbytes if record.location else 0)
            entry = header.plan(title_of(record.key), record.dtype, record.shape, begin, end)
            assert entry is not None, "the region has room for every entry"
            header.add(entry)
            self._manifest.add(name, entry.name, record, record.dtype)
        with (self._path / name).open("xb") as file:
            file.write(header.pack())
            for record in records:
                file.write(run.bytes_of(record))
                advance(record)

    def close(self) -> None:
        self._manifest.close()


class Hdf5Export:
    """One HDF5 file: a group a module; attributes identify each dataset. Opens as a run again."""

    def __init__(self, path: Path, run: Run, ranks: Sequence[int]) -> None:
        self._several = len(ranks) > 1
        self._unique: dict[str, Unique] = {}
        self._file = create_file(path)
        set_attributes(self._file, about(run))
        self._file.attrs["ranks"] = np.array(ranks, np.int64)

    def step(self, run: Run, records: Sequence[Record], advance: Advance) -> None:
        for record in records:
            key = record.key
            module = link_name(display_name(key.module))
            group = self._file.require_group(module)
            unique = self._unique.setdefault(module, Unique())
            name = f"step_{key.step:06d}.{pass_of(key)}.call_{key.call}.{key.kind}.{key.path}"
            if self._several:
                name = f"{rank_name(record.rank)}.{name}"
            attributes = {**key._asdict(), "class": record.cls, "rank": record.rank, "seq": record.seq}
            put(group, unique(link_name(name)), run.load(record), attributes)
            advance(record)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _new_folder(path: Path, run: Run) -> Manifest:
    """Make the folder of an export, and open its manifest."""
    path.mkdir()
    (path / ABOUT).write_text(json.dumps(about(run), indent=2) + "\n", encoding="utf-8")
    return Manifest(path / MANIFEST)


WRITERS: dict[str, Callable[[Path, Run, Sequence[int]], ExportWriter]] = {
    "hdf5": Hdf5Export,
    "npy": NpyExport,
    "npz": NpzExport,
    "safetensors": SafetensorsExport,
}
