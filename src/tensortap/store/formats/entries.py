"""Tensors of other formats as a run: each has an identity and a function that loads it. Most readers build on this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.machine import memory
from tensortap.core.records import Key, Location, Record, Summary
from tensortap.errors import RunUnreadable, shorten
from tensortap.store.index import Index
from tensortap.store.run import RunSource, reason_of
from tensortap.store.source import Bytes, LocalFiles, bytes_of_array, kept_location

__all__ = [
    "Array",
    "LoadedTensor",
    "StoredTensor",
    "Summarize",
    "TensorList",
    "check_expansion",
    "few_notices",
    "phase_of",
    "same_tensors",
    "unique_key",
]

Array = npt.NDArray[Any]
Summarize = Callable[[Array], Summary]
_ENTRY = "entry:"
_SHOWN = 3
_MOST_RATIO = 1032
"""Upper bound on the bytes that deflate expands one byte to."""
_FREE = 1 << 16
"""Size in bytes below which a declared size is not checked against the file."""


class LoadedTensor(NamedTuple):
    """The values of a tensor."""

    array: Array
    location: Location | None = None
    """The range of a file that holds the same bytes, if there is one. The file is named from the run's path."""


class StoredTensor(NamedTuple):
    """One tensor of a file that is read as a run."""

    key: Key
    name: str
    """Its name in notices."""
    load: Callable[[], LoadedTensor]
    """Loads the tensor. Raises RunUnreadable, with the reason alone, if that fails."""
    rank: int = 0
    cls: str = ""


class TensorList(RunSource):
    """Tensors in execution order. The index is built on first use, which loads every tensor once.

    `on_disk` becomes False with the first tensor that is not a range of a file.
    """

    on_disk = True

    def __init__(
        self,
        path: Path,
        tensors: Sequence[StoredTensor],
        info: Mapping[str, Any],
        summarize: Summarize,
        *,
        files: Bytes | None = None,
        notices: Sequence[str] = (),
        complete: bool = True,
        strict: bool = False,
        checkpoint: bool = False,
        only_module: str | None = None,
    ) -> None:
        """`files` reads the ranges of loaded tensors. With `strict`, an unreadable tensor is an error, not a notice."""
        super().__init__(path, info, {tensor.rank for tensor in tensors} or {0})
        self.is_checkpoint = checkpoint
        self.only_module = only_module
        self._tensors = tensors
        self._summarize = summarize
        self._files = files or LocalFiles(path)
        self._notices = list(notices)
        self._unreadable: dict[int, list[str]] = {}
        self._complete = complete
        self._strict = strict

    def finished(self) -> bool:
        return self._complete

    def notices(self) -> list[str]:
        found = [] if self._complete else ["the run was not finished when it was written here"]
        return found + self._notices + few_notices("unreadable tensors", self.unreadable())

    def unreadable(self) -> list[str]:
        for rank in self.ranks:
            self.index(rank)
        return [each for rank in self.ranks for each in self._unreadable[rank]]

    def read_index(self, rank: int) -> Index:
        self._unreadable[rank] = []
        records = self._records(rank)
        # Two parameters of a checkpoint are two tensors even if their values are equal.
        return Index.of_records(list(records) if self.is_checkpoint else same_tensors(records), rank)

    def view(self, record: Record) -> memoryview:
        location = kept_location(record)
        if not location.file.startswith(_ENTRY):
            return self._files.view(location.file, location.offset, location.nbytes)
        return bytes_of_array(self._load(location))

    def read(self, record: Record) -> memoryview:
        location = kept_location(record)
        if not location.file.startswith(_ENTRY):
            return self._files.read(location.file, location.offset, location.nbytes)
        return super().read(record)

    def address(self, rank: int, file: str) -> str:
        return str(self.path) if file.startswith(_ENTRY) else self._files.address(file)

    def close(self) -> None:
        super().close()
        self._files.close()

    def _load(self, location: Location) -> Array:
        tensor = self._tensors[int(location.file.removeprefix(_ENTRY))]
        try:
            return tensor.load().array
        except Exception as error:  # a damaged file can make any library raise anything
            raise RunUnreadable(
                f"{self.path}: {shorten(tensor.name)} cannot be read any more: {reason_of(error)}."
            ) from error

    def _records(self, rank: int) -> Iterator[Record]:
        used: set[Key] = set()
        seq = 0
        for number, tensor in enumerate(self._tensors):
            if tensor.rank != rank:
                continue
            try:
                array, location = tensor.load()
                dtype = dtypes.name_of(array.dtype)
            except Exception as error:
                reason = reason_of(error)
                if self._strict:
                    raise RunUnreadable(f"{self.path}: {shorten(tensor.name)} cannot be read: {reason}.") from error
                self._unreadable[rank].append(f"{shorten(tensor.name)}: {reason}")
                continue
            if location is None:
                self.on_disk = False
                location = Location(f"{_ENTRY}{number}", 0, array.nbytes)
            key, summary = unique_key(tensor.key, used), self._summarize(array)
            yield Record(key, rank, seq, tensor.cls, dtype, array.shape, seq, summary, location)
            seq += 1


def same_tensors(records: Iterator[Record]) -> list[Record]:
    """Give records with equal bits the same `tensor`, which shows the flow of values from module to module.

    Tensors whose elements are all equal, as a gradient of zeros, stay apart.
    """
    first: dict[Any, int] = {}
    found = []
    for record in records:
        summary = record.summary
        number = first.setdefault((record.dtype, record.shape, summary.digest), record.seq)
        found.append(replace(record, tensor=number) if summary.min != summary.max else record)
    return found


def check_expansion(nbytes: int, stored: int) -> None:
    """Raise RunUnreadable if `stored` bytes of a file cannot hold `nbytes`, or memory cannot.

    A damaged or malicious file may declare arrays of any size.
    """
    if nbytes > max(_FREE, _MOST_RATIO * stored):
        raise RunUnreadable(f"it declares {nbytes:,} bytes: {stored:,} bytes cannot hold that many")
    if 0 < memory() < nbytes:
        raise RunUnreadable(f"it declares {nbytes:,} bytes, more than this machine has memory")


def unique_key(key: Key, used: set[Key]) -> Key:
    """Return the key, with ~2 behind its path if it was used before, as in a second backward through one graph."""
    path, number = key.path, 1
    while key in used:
        number += 1
        key = key._replace(path=f"{path}~{number}")
    used.add(key)
    return key


def phase_of(kind: str) -> str:
    """Return the phase of a record, for formats that name only its kind."""
    if kind in ("param", "buffer", "step_grad"):
        return "state"
    return "backward" if "grad" in kind else "forward"


def few_notices(what: str, each: Sequence[str]) -> list[str]:
    """Return one notice about many similar problems, or none: how many there are, and the first of them."""
    if not each:
        return []
    more = f"; and {len(each) - _SHOWN} more" if len(each) > _SHOWN else ""
    return [f"{what} ({len(each)}): {'; '.join(islice(each, _SHOWN))}{more}"]
