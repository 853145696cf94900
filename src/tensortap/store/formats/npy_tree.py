"""A tree of .npy files, as saving hooks write it, opened as a run. `npy_names` says what the names mean.

The tree knows no optimizer steps. Each forward of the model counts as a step of its own, as in a captured run that
takes one step for each forward, and is compared with that one. Paddle's names (`linear_0`) are those of its layers, not
of their place in the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap import dtypes
from tensortap.errors import RunUnreadable
from tensortap.records import Coverage, Key, Location, Record, Summary
from tensortap.store.format import RUN_JSON, encode, rank_name
from tensortap.store.formats.npy_names import GRADS, TENSORS, NpyName, files_in, rank_folders
from tensortap.store.reader import Run
from tensortap.store.span import Spans
from tensortap.store.table import Index

__all__ = ["NpyTree", "is_npy_tree", "open_npy_tree"]

Array = npt.NDArray[Any]
Summarize = Callable[[Array], Summary]


def is_npy_tree(path: Path) -> bool:
    if not path.is_dir() or (path / RUN_JSON).exists():
        return False
    return any(rank_folders(path / kind) for kind in (TENSORS, GRADS))


def open_npy_tree(path: Path, summarize: Summarize) -> NpyTree:
    return NpyTree(path, summarize)


class _Saved(NamedTuple):
    """A file and what its name says."""

    kind: str
    file: str
    name: NpyName


class _Files(Spans):
    """The bytes of .npy files. In the index they are called as below the tree, without the rank."""

    def path_of(self, rank: int, name: str) -> Path:
        kind, _, file = name.partition("/")
        if kind not in (TENSORS, GRADS) or Path(file).name != file:
            raise RunUnreadable(f"{self._path}: there is no file {name!r} in a tree of .npy files.")
        return self._path / kind / rank_name(rank) / file


class NpyTree(Run):
    """A run over the files of a tree. The index is made when first asked for: that reads every file once."""

    def __init__(self, path: Path, summarize: Summarize) -> None:
        ranks = sorted({rank for kind in (TENSORS, GRADS) for rank in rank_folders(path / kind)})
        info = {"framework": "npy tree", "model": path.name, "format": "npy tree", "config": {}, "world": len(ranks)}
        super().__init__(path, info, ranks)
        self._spans = _Files(path)
        self._summarize = summarize
        self._said: dict[int, list[str]] = {}

    @property
    def finished(self) -> bool:
        return True

    @property
    def notices(self) -> list[str]:
        for rank in self.ranks:
            self._index(rank)
        return [f"rank {rank}: {text}" for rank in self.ranks for text in self._said[rank]]

    @property
    def coverage(self) -> dict[int, list[Coverage]]:
        """Of the layers that were not saved the tree says nothing."""
        found: dict[int, list[Coverage]] = {}
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
        self._said[rank] = []
        saved = self._saved(rank)
        classes = {each.name.name: each.name.cls for each in saved if each.name.cls}
        seen: dict[Key, int] = defaultdict(int)
        sequence = 0
        for each in saved:
            key = _key(each)
            seen[key] += 1
            file = self._spans.path_of(rank, f"{each.kind}/{each.file}")
            try:
                array = np.load(file, allow_pickle=False)
                dtype = dtypes.name_of(array.dtype)
            except (OSError, ValueError, EOFError) as error:
                self._said[rank].append(f"{each.kind}/{each.file} cannot be read: {error}")
                continue
            except KeyError as unknown:
                self._said[rank].append(f"{each.kind}/{each.file} is left out: {unknown.args[0]} is no known dtype")
                continue
            location = _location(each, file, array)
            if location is None:
                self._said[rank].append(f"{each.kind}/{each.file} lies column by column: only its summary is used")
            yield Record(
                key=key._replace(call=seen[key] - 1),
                rank=rank,
                seq=sequence,
                cls=each.name.cls or classes.get(key.module, ""),
                dtype=dtype,
                shape=array.shape,
                tensor=sequence,
                summary=self._summarize(array),
                location=location,
            )
            sequence += 1

    def _saved(self, rank: int) -> list[_Saved]:
        """In execution order: of each micro step first what was put out, then the gradients."""
        found = []
        for kind in (TENSORS, GRADS):
            folder = self.path / kind / rank_name(rank)
            for file, name in files_in(folder) if folder.is_dir() else ():
                if name is None:
                    self._said[rank].append(f"{kind}/{file} is left out: its name says not what it is")
                else:
                    found.append(_Saved(kind, file, name))
        return sorted(found, key=lambda saved: (saved.name.micro, saved.kind == GRADS))


def _key(saved: _Saved) -> Key:
    name = saved.name
    if saved.kind == TENSORS:
        return Key(name.micro, 0, "forward", name.name, 0, "output", name.path)
    module, _, parameter = name.name.rpartition(".")
    return Key(name.micro, 0, "backward", module, 0, "param_grad", parameter)


def _location(saved: _Saved, file: Path, array: Array) -> Location | None:
    """Where the elements lie in the file; None if not in the usual order."""
    if not array.flags.c_contiguous or not array.dtype.isnative:
        return None
    expected = prod(array.shape) * array.dtype.itemsize
    return Location(f"{saved.kind}/{saved.file}", file.stat().st_size - expected, expected)
