"""A tree of .npy files, as saving hooks write it, opened as a run. `npy_names` defines the names of the files.

The tree knows no optimizer steps. Each forward of the model counts as a step, as in a captured run that takes one step
for each forward.

Modules and parameters have the names of the sidecar (`npy_sidecar`), which are those of a captured run. If a file is
not in the sidecar, all names come from the files. For paddle these are `linear_0` and `linear_0.w_0`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.presentation import CoverageByRank
from tensortap.core.records import Coverage, Key, Location, Record, Summary
from tensortap.errors import RunUnreadable
from tensortap.store.exports.plain import narrow, widen
from tensortap.store.format import RUN_JSON, encode, rank_name
from tensortap.store.formats.npy.bfloat16 import Bfloat16Evidence
from tensortap.store.formats.npy.file import map_npy, read_npy
from tensortap.store.formats.npy.names import GRADS, TENSORS, NpyName, files_in, rank_folders
from tensortap.store.formats.npy.pairs import Adopted, adopt
from tensortap.store.formats.npy.sidecar import read_sidecar
from tensortap.store.index import Index
from tensortap.store.run import Run
from tensortap.store.source import Spans

__all__ = ["NpyTree", "is_npy_tree", "open_npy_tree", "with_common_names"]

Array = npt.NDArray[Any]
Summarize = Callable[[Array], Summary]
_WIDENED = "widened:"
"""Marks the location of a tensor that is wider in its file than it was in the model."""


def is_npy_tree(path: Path) -> bool:
    if not path.is_dir() or (path / RUN_JSON).exists():
        return False
    return any(rank_folders(path / kind) for kind in (TENSORS, GRADS))


def open_npy_tree(path: Path, summarize: Summarize) -> NpyTree:
    return NpyTree(path, summarize)


def with_common_names(reference: Run, candidate: Run) -> tuple[Run, Run]:
    """Return the same runs; if both are trees, with keys under which files that belong together are aligned.

    A tree without a sidecar has only the names of its files, so the other tree gets those too. `npy_pairs` decides
    which files belong together.
    """
    if not isinstance(reference, NpyTree) or not isinstance(candidate, NpyTree):
        return reference, candidate
    file_names = not (reference.has_module_names and candidate.has_module_names)
    adopted = adopt(reference.path, candidate.path)
    if file_names and reference.has_module_names:
        reference = reference.reopened(file_names=True)
    if adopted.calls or (file_names and (candidate.has_module_names or adopted.names)):
        candidate = candidate.reopened(file_names, adopted)
    return reference, candidate


class _Saved(NamedTuple):
    """A file and the content of its name."""

    kind: str
    file: str
    name: NpyName

    @property
    def place(self) -> str:
        """Below the tree, without the rank."""
        return f"{self.kind}/{self.file}"


class _Files(Spans):
    """The bytes of .npy files. The index names them by their place in the tree, without the rank."""

    def view(self, record: Record) -> memoryview:
        span = record.location
        if span is None or not span.file.startswith(_WIDENED):
            return super().view(record)
        array = read_npy(self.path_of(record.rank, span.file.removeprefix(_WIDENED)))
        return np.ascontiguousarray(narrow(array, record.dtype)).reshape(-1).view(np.uint8).data.toreadonly()

    def read(self, record: Record) -> memoryview:
        span = record.location
        if span is None or not span.file.startswith(_WIDENED):
            return super().read(record)
        return self.view(record)

    def path_of(self, rank: int, name: str) -> Path:
        kind, _, file = name.partition("/")
        if kind not in (TENSORS, GRADS) or Path(file).name != file:
            raise RunUnreadable(f"{self._path}: there is no file {name!r} in a tree of .npy files.")
        return self._path / kind / rank_name(rank) / file


class NpyTree(Run):
    """A run over the files of a tree. The index is made on first use, which reads every file once."""

    def __init__(
        self, path: Path, summarize: Summarize, *, file_names: bool = False, adopted: Adopted | None = None
    ) -> None:
        ranks = sorted({rank for kind in (TENSORS, GRADS) for rank in rank_folders(path / kind)})
        self._sidecars = {rank: read_sidecar(path, rank) for rank in ranks}
        world = max((sidecar.world for sidecar in self._sidecars.values()), default=0)
        frameworks = {sidecar.framework for sidecar in self._sidecars.values()}
        framework = frameworks.pop() if len(frameworks) == 1 else ""
        info = {"framework": framework or "npy tree", "model": path.name, "format": "npy tree", "config": {}}
        super().__init__(path, {**info, "world": max(world, len(ranks))}, ranks)
        self._spans = _Files(path)
        self._summarize = summarize
        self._file_names = file_names
        self._renamed, self._calls_elsewhere = adopted or Adopted({}, {})
        self._said: dict[int, list[str]] = {}

    @cached_property
    def has_module_names(self) -> bool:
        """Whether the sidecar names the module of every file."""
        return not self._file_names and all(
            saved.place in self._sidecars[rank].entries for rank in self.ranks for saved in self._saved(rank)
        )

    def reopened(self, file_names: bool, adopted: Adopted | None = None) -> NpyTree:
        """Open the tree again, with the names of its files, or with names and calls of another tree."""
        return NpyTree(self.path, self._summarize, file_names=file_names, adopted=adopted)

    @property
    def finished(self) -> bool:
        return True

    @property
    def notices(self) -> list[str]:
        for rank in self.ranks:
            self._index(rank)
        found = [f"rank {rank}: {text}" for rank in self.ranks for text in self._said[rank]]
        if self._inferred:
            found.append(
                f"{len(self._inferred)} tensors count as bfloat16: they are saved as float32, and all values have the "
                "precision of bfloat16 (inferred; the tree does not record dtypes)"
            )
        if self._renamed and not self.has_module_names:
            found.append("layers are paired with those of the reference by their order: no name is the same")
        return found

    @property
    def coverage(self) -> dict[int, list[Coverage]]:
        """The saved layers. The tree does not know the others."""
        found = CoverageByRank()
        for rank in self.ranks:
            calls: dict[tuple[str, str], int] = defaultdict(int)
            for record in self.records(rank=rank, kind="output", path="0"):
                calls[record.key.module, record.cls] += 1
            found[rank] = [Coverage(module, cls, "seen", count) for (module, cls), count in calls.items()]
        return found

    def _index(self, rank: int) -> Index:
        if rank not in self._indexes and rank in self.ranks:
            records = list(self._described(rank))
            self._indexes[rank] = Index.of([encode(records, [True] * len(records))] if records else [], rank)
        return super()._index(rank)

    def _described(self, rank: int) -> Iterator[Record]:
        said = self._said[rank] = self._unnamed(rank)
        saved = self._saved(rank)
        classes = {self._key(rank, each).module: each.name.cls for each in saved if each.name.cls}
        seen: dict[Key, int] = defaultdict(int)
        sequence = 0
        for each in saved:
            key = self._key(rank, each)
            seen[key] += 1
            file = self._spans.path_of(rank, each.place)
            try:
                stored = read_npy(file)
            except RunUnreadable as error:
                said.append(f"{each.place} cannot be read: {error}")
                continue
            array = self._original(rank, each, stored)
            if array is not stored:
                location: Location | None = Location(_WIDENED + each.place, 0, array.nbytes)
                self.on_disk = False
            elif (location := _location(each, file, array)) is None:
                said.append(f"{each.place} is stored column by column: only its summary is used")
            entry = self._sidecars[rank].entries.get(each.place)
            yield Record(
                key=key._replace(call=self._calls_elsewhere.get((rank, each.place), seen[key] - 1)),
                rank=rank,
                seq=sequence,
                cls=each.name.cls or classes.get(key.module) or (entry.cls if entry else ""),
                dtype=dtypes.name_of(array.dtype),
                shape=array.shape,
                tensor=sequence,
                summary=self._summarize(array),
                location=location,
            )
            sequence += 1

    def _key(self, rank: int, saved: _Saved) -> Key:
        name = saved.name
        if self.has_module_names:
            _, module, path, _ = self._sidecars[rank].entries[saved.place]
        elif saved.kind == TENSORS:
            module, path = self._renamed.get(name.name, name.name), name.path
        else:
            module, _, path = self._renamed.get(name.name, name.name).rpartition(".")
        if saved.kind == TENSORS:
            return Key(name.micro, 0, "forward", module, 0, "output", path)
        return Key(name.micro, 0, "backward", module, 0, "param_grad", path)

    def _original(self, rank: int, saved: _Saved, stored: Array) -> Array:
        """Return the tensor in the dtype that it had in the model."""
        entry = self._sidecars[rank].entries.get(saved.place)
        if entry is None:
            return narrow(stored, "bfloat16") if (rank, saved.place) in self._inferred else stored
        if entry.dtype == dtypes.name_of(stored.dtype):
            return stored
        original = narrow(stored, entry.dtype) if stored.dtype == np.float32 else stored
        if original is stored or not np.array_equal(_bits(widen(original)), _bits(stored)):
            self._said[rank].append(
                f"{saved.place} holds {stored.dtype} values although {entry.dtype} was recorded: it was replaced later"
            )
            return stored
        return original

    @cached_property
    def _inferred(self) -> set[tuple[int, str]]:
        """The files of bfloat16 tensors that no sidecar describes, by rank and place."""
        evidence = Bfloat16Evidence[tuple[int, str]]()
        for rank in self.ranks:
            for saved in self._saved(rank):
                if saved.place in self._sidecars[rank].entries:
                    continue
                array = map_npy(self._spans.path_of(rank, saved.place))
                if array is not None and array.dtype == np.float32:
                    evidence.add((saved.kind, saved.name.name, saved.name.path), (rank, saved.place), array)
        return evidence.files()

    def _saved(self, rank: int) -> list[_Saved]:
        """The files in execution order: of each micro step first the outputs, then the gradients."""
        found = [
            _Saved(kind, file, name)
            for kind in (TENSORS, GRADS)
            for file, name in self._listed(rank, kind)
            if name is not None
        ]
        return sorted(found, key=lambda saved: (saved.name.micro, saved.kind == GRADS))

    def _unnamed(self, rank: int) -> list[str]:
        """Notices on what is not used."""
        found = [
            f"{kind}/{file} is left out: its name is not one of a saving hook"
            for kind in (TENSORS, GRADS)
            for file, name in self._listed(rank, kind)
            if name is None
        ]
        return found + ([self._sidecars[rank].notice] if self._sidecars[rank].notice else [])

    def _listed(self, rank: int, kind: str) -> list[tuple[str, NpyName | None]]:
        folder = self.path / kind / rank_name(rank)
        return files_in(folder) if folder.is_dir() else []


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _location(saved: _Saved, file: Path, array: Array) -> Location | None:
    """Return where the elements are in the file. None if they are not in the usual order."""
    if not array.flags.c_contiguous or not array.dtype.isnative:
        return None
    expected = prod(array.shape) * array.dtype.itemsize
    return Location(saved.place, file.stat().st_size - expected, expected)
