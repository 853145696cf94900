"""A run over tensors of other formats: each has an identity and a way to load it. Readers of formats build on this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.records import Key, Location, Record, Summary
from tensortap.errors import RunNotFound, RunUnreadable
from tensortap.store.format import encode
from tensortap.store.index import Index
from tensortap.store.run import Run
from tensortap.store.source import Spans

__all__ = ["Array", "EntriesRun", "Entry", "Loaded", "Summarize", "backward_or_forward", "few_notices", "unique_key"]

Array = npt.NDArray[Any]
Summarize = Callable[[Array], Summary]
_ENTRY = "entry:"
_SHOWN = 3


class Loaded(NamedTuple):
    """The values of a tensor."""

    array: Array
    span: Location | None = None
    """Where in a file the same bytes are, if they are there as in memory. The file is named from the run's path."""


class Entry(NamedTuple):
    """One tensor of a run."""

    key: Key
    name: str
    """What notices call it."""
    load: Callable[[], Loaded]
    """Raises RunUnreadable, with the reason alone, if the tensor cannot be read."""
    rank: int = 0
    cls: str = ""


class EntriesRun(Run):
    """A run over entries in execution order. The index is built on first use, which loads every tensor once."""

    def __init__(
        self,
        path: Path,
        entries: Sequence[Entry],
        info: dict[str, Any],
        summarize: Summarize,
        *,
        notices: Sequence[str] = (),
        complete: bool = True,
        strict: bool = False,
    ) -> None:
        """With `strict`, a tensor that cannot be read is an error and not a notice."""
        super().__init__(path, info, sorted({entry.rank for entry in entries}) or [0])
        self._entries = entries
        self._summarize = summarize
        self._spans = _EntryBytes(path, entries)
        self._known = list(notices)
        self._unreadable: dict[int, list[str]] = {}
        self._complete = complete
        self._strict = strict

    @property
    def finished(self) -> bool:
        return self._complete

    @property
    def notices(self) -> list[str]:
        found = [] if self._complete else ["the run was not finished when it was written here"]
        unreadable = [each for rank in self.ranks if self._index(rank) for each in self._unreadable[rank]]
        return found + self._known + few_notices("unreadable tensors", unreadable)

    def _index(self, rank: int) -> Index:
        if rank not in self.ranks:
            raise RunNotFound(f"{self.path} has no rank {rank}; it has {', '.join(map(str, self.ranks[:8]))}.")
        if rank not in self._indexes:
            self._unreadable[rank] = []
            records = list(self._described(rank))
            batches = [encode(records, [record.tensor == record.seq for record in records])] if records else []
            self._indexes[rank] = Index.of(batches, rank)
        return self._indexes[rank]

    def _described(self, rank: int) -> Iterator[Record]:
        used: set[Key] = set()
        known: dict[Any, int] = {}
        seq = 0
        for number, entry in enumerate(self._entries):
            if entry.rank != rank:
                continue
            try:
                array, span = entry.load()
            except RunUnreadable as error:
                if self._strict:
                    raise RunUnreadable(f"{self.path}: {entry.name} cannot be read: {error}.") from error
                self._unreadable[rank].append(f"{entry.name}: {error}")
                continue
            if span is None:
                self.on_disk = False
            dtype, summary = dtypes.name_of(array.dtype), self._summarize(array)
            # Equal bits are taken for one tensor: that is how values flow from module to module. Not where all
            # elements are equal, as in a gradient of zeros.
            tensor = known.setdefault((dtype, array.shape, summary.digest), seq)
            tensor = tensor if summary.min != summary.max else seq
            location = span or Location(f"{_ENTRY}{number}", 0, array.nbytes)
            key = unique_key(entry.key, used)
            yield Record(key, rank, seq, entry.cls, dtype, array.shape, tensor, summary, location)
            seq += 1


class _EntryBytes(Spans):
    """The bytes of entries: spans of files where they lie there as in memory, else loaded."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        super().__init__(path)
        self._entries = entries

    def view(self, record: Record) -> memoryview:
        span = record.location
        if span is None or not span.file.startswith(_ENTRY):
            return super().view(record)
        entry = self._entries[int(span.file.removeprefix(_ENTRY))]
        try:
            array = entry.load().array
        except RunUnreadable as error:
            raise RunUnreadable(f"{self._path}: {entry.name} cannot be read any more: {error}") from error
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data.toreadonly()

    def read(self, record: Record) -> memoryview:
        span = record.location
        if span is None or not span.file.startswith(_ENTRY):
            return super().read(record)
        return memoryview(bytearray(self.view(record))).toreadonly()

    def path_of(self, rank: int, name: str) -> Path:
        return self._path / name if name else self._path


def unique_key(key: Key, used: set[Key]) -> Key:
    """The key, with a ~2 behind its path if it was used before, as a second backward through one graph has it."""
    path, number = key.path, 1
    while key in used:
        number += 1
        key = key._replace(path=f"{path}~{number}")
    used.add(key)
    return key


def backward_or_forward(kind: str) -> str:
    """The phase of a record, where a format names only its kind."""
    if kind in ("param", "buffer"):
        return "state"
    return "backward" if "grad" in kind else "forward"


def few_notices(what: str, each: Sequence[str]) -> list[str]:
    """One notice about many things of a kind, or none: how many there are, and the first of them."""
    if not each:
        return []
    more = f"; and {len(each) - _SHOWN} more" if len(each) > _SHOWN else ""
    return [f"{what} ({len(each)}): {'; '.join(islice(each, _SHOWN))}{more}"]
