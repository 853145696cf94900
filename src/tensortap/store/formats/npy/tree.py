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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.records import Coverage, Key, Location, Record, Summary
from tensortap.errors import RunUnreadable
from tensortap.store.exports.plain import narrow, widen
from tensortap.store.format import RUN_JSON, rank_name
from tensortap.store.formats.entries import LoadedTensor
from tensortap.store.formats.npy.bfloat16 import Bfloat16Evidence
from tensortap.store.formats.npy.file import load_npy
from tensortap.store.formats.npy.names import GRADS, TENSORS, NpyName, files_in, rank_folders
from tensortap.store.formats.npy.pairs import Adopted, adopt
from tensortap.store.formats.npy.sidecar import read_sidecar
from tensortap.store.index import Index
from tensortap.store.query import Filter
from tensortap.store.run import Run, RunSource, reason_of
from tensortap.store.source import LocalFiles, bytes_of_array, kept_location

__all__ = ["NpyTree", "open_source", "recognizes", "with_common_names"]

Array = npt.NDArray[Any]
Summarize = Callable[[Array], Summary]
_WIDENED = "widened:"
"""Marks the location of a tensor that is wider in its file than it was in the model."""


def recognizes(path: Path) -> bool:
    """Return whether a folder has tensors or gradients in rank folders."""
    if not path.is_dir() or (path / RUN_JSON).exists():
        return False
    return any(rank_folders(path / kind) for kind in (TENSORS, GRADS))


def open_source(path: Path, summarize: Summarize) -> NpyTree:
    """Open a tree."""
    return NpyTree(path, summarize)


def with_common_names(reference: Run, candidate: Run) -> tuple[Run, Run]:
    """Return the same runs; if both are trees, with keys under which files that belong together are aligned.

    A tree without a sidecar has only the names of its files, so the other tree gets those too. `npy_pairs` decides
    which files belong together.
    """
    ours, theirs = reference.source, candidate.source
    if not isinstance(ours, NpyTree) or not isinstance(theirs, NpyTree):
        return reference, candidate
    file_names = not (ours.has_module_names and theirs.has_module_names)
    adopted = adopt(ours.path, theirs.path)
    if file_names and ours.has_module_names:
        reference = Run(ours.reopened(file_names=True))
    if adopted.calls or (file_names and (theirs.has_module_names or adopted.names)):
        candidate = Run(theirs.reopened(file_names, adopted))
    return reference, candidate


class _SavedFile(NamedTuple):
    """A file and its parsed name."""

    kind: str
    file: str
    name: NpyName

    @property
    def place(self) -> str:
        """Below the tree, without the rank."""
        return f"{self.kind}/{self.file}"


class NpyTree(RunSource):
    """The files of a tree. The index is built on first use, which reads every file once."""

    on_disk = True

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
        self._files = LocalFiles(path)
        self._summarize = summarize
        self._file_names = file_names
        self._renamed, self._calls_elsewhere = adopted or Adopted({}, {})
        self._rank_notices: dict[int, list[str]] = {}

    @cached_property
    def has_module_names(self) -> bool:
        """Whether the sidecar names the module of every file."""
        return not self._file_names and all(
            saved.place in self._sidecars[rank].entries for rank in self.ranks for saved in self._saved(rank)
        )

    def reopened(self, file_names: bool, adopted: Adopted | None = None) -> NpyTree:
        """Open the tree again, with the names of its files, or with names and calls of another tree."""
        return NpyTree(self.path, self._summarize, file_names=file_names, adopted=adopted)

    def notices(self) -> list[str]:
        for rank in self.ranks:
            self.index(rank)
        found = [f"rank {rank}: {text}" for rank in self.ranks for text in self._rank_notices[rank]]
        if self._inferred:
            found.append(
                f"{len(self._inferred)} tensors count as bfloat16: they are saved as float32, and all values have the "
                "precision of bfloat16 (inferred; the tree does not record dtypes)"
            )
        if self._renamed and not self.has_module_names:
            found.append("layers are paired with those of the reference by their order: no name is the same")
        return found

    def coverage(self) -> dict[int, list[Coverage]]:
        """Return the saved layers. The tree does not know the others."""
        found: dict[int, list[Coverage]] = {}
        for rank in self.ranks:
            index = self.index(rank)
            calls: dict[tuple[str, str], int] = defaultdict(int)
            for record in index.records(Filter(kind="output", path="0").rows(index.columns)):
                calls[record.key.module, record.cls] += 1
            found[rank] = [Coverage(module, cls, "seen", count) for (module, cls), count in calls.items()]
        return found

    def read_index(self, rank: int) -> Index:
        return Index.of_records(list(self._records(rank)), rank)

    def view(self, record: Record) -> memoryview:
        location = kept_location(record)
        if not location.file.startswith(_WIDENED):
            return self._files.view(self._name(record.rank, location.file), location.offset, location.nbytes)
        name = self._name(record.rank, location.file.removeprefix(_WIDENED))
        return bytes_of_array(narrow(load_npy(self._files, name).array, record.dtype))

    def read(self, record: Record) -> memoryview:
        location = kept_location(record)
        if location.file.startswith(_WIDENED):
            return super().read(record)
        return self._files.read(self._name(record.rank, location.file), location.offset, location.nbytes)

    def address(self, rank: int, file: str) -> str:
        return self._files.address(self._name(rank, file))

    def close(self) -> None:
        super().close()
        self._files.close()

    def _name(self, rank: int, place: str) -> str:
        """Return the name of a file below the tree."""
        kind, _, file = place.partition("/")
        if kind not in (TENSORS, GRADS) or Path(file).name != file:
            raise RunUnreadable(f"{self.path}: there is no file {place!r} in a tree of .npy files.")
        return f"{kind}/{rank_name(rank)}/{file}"

    def _records(self, rank: int) -> Iterator[Record]:
        notices = self._rank_notices[rank] = self._unnamed(rank)
        saved = self._saved(rank)
        classes = {self._key(rank, each).module: each.name.cls for each in saved if each.name.cls}
        seen: dict[Key, int] = defaultdict(int)
        sequence = 0
        for each in saved:
            key = self._key(rank, each)
            seen[key] += 1
            try:
                stored, location = self._load(rank, each)
            except (OSError, RunUnreadable) as error:
                notices.append(f"{each.place} cannot be read: {reason_of(error)}")
                continue
            array = self._original(rank, each, stored)
            if array is not stored:
                location = Location(_WIDENED + each.place, 0, array.nbytes)
                self.on_disk = False
            elif location is None:
                notices.append(f"{each.place} is stored column by column: only its summary is used")
            else:
                location = location._replace(file=each.place)
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

    def _load(self, rank: int, saved: _SavedFile) -> LoadedTensor:
        array, location = load_npy(self._files, self._name(rank, saved.place))
        try:
            dtypes.name_of(array.dtype)
        except KeyError:
            known = ", ".join(dtypes.NAMES)
            raise RunUnreadable(f"elements of dtype {array.dtype} cannot be compared; known are {known}") from None
        return LoadedTensor(array, location)

    def _key(self, rank: int, saved: _SavedFile) -> Key:
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

    def _original(self, rank: int, saved: _SavedFile, stored: Array) -> Array:
        """Return the tensor in the dtype that it had in the model."""
        entry = self._sidecars[rank].entries.get(saved.place)
        if entry is None:
            return narrow(stored, "bfloat16") if (rank, saved.place) in self._inferred else stored
        if entry.dtype == dtypes.name_of(stored.dtype):
            return stored
        original = narrow(stored, entry.dtype) if stored.dtype == np.float32 else stored
        if original is stored or not np.array_equal(_bits(widen(original)), _bits(stored)):
            self._rank_notices[rank].append(
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
                array = self._mapped(rank, saved)
                if array is not None and array.dtype == np.float32:
                    evidence.add((saved.kind, saved.name.name, saved.name.path), (rank, saved.place), array)
        return evidence.files()

    def _mapped(self, rank: int, saved: _SavedFile) -> Array | None:
        try:
            return load_npy(self._files, self._name(rank, saved.place)).array
        except (OSError, RunUnreadable):
            return None  # reported with the index

    def _saved(self, rank: int) -> list[_SavedFile]:
        """Return the files in execution order: the outputs of each micro step, then its gradients."""
        found = [
            _SavedFile(kind, file, name)
            for kind in (TENSORS, GRADS)
            for file, name in self._listed(rank, kind)
            if name is not None
        ]
        return sorted(found, key=lambda saved: (saved.name.micro, saved.kind == GRADS))

    def _unnamed(self, rank: int) -> list[str]:
        """Notices on files that are not used."""
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
