"""HDF5 files of tensors, opened as a run: dumps, exports, and the files that older dumpers left.

A dataset's identity is in attributes of its own, its group's or the file's. A file without any is read by its names:
`018_BatchNorm2d/grad_input0` is a gradient of the module "0018_BatchNorm2d".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.records import Key, Location, Record
from tensortap.errors import RunNotFound, RunUnreadable, shorten
from tensortap.store.exports.plain import recorded
from tensortap.store.formats.entries import Summarize, check_expansion, same_tensors, unique_key
from tensortap.store.formats.hdf5.probe import find_damaged
from tensortap.store.formats.pickles.refusal import holds_pickle
from tensortap.store.index import Index
from tensortap.store.run import RunSource
from tensortap.store.source import SingleFile, bytes_of_array, kept_location, read_head

__all__ = ["Hdf5File", "dump_step", "open_source", "recognizes"]

Array = npt.NDArray[Any]
_ENDINGS = (".hdf5", ".h5", ".hdf")
_MAGIC = b"\x89HDF\r\n\x1a\n"
_GROUP = re.compile(r"([0-9]+)_(.*)", re.DOTALL)
_DATASET = re.compile(r"(feat_input|feat_output|grad_input|grad_output)([0-9]*)")
_FILE = re.compile(r"([0-9]+)-epoch_([0-9]+)-step_dump")
_KINDS = {"feat_input": "input", "feat_output": "output"}
_EPOCH = 1_000_000
_MOST_DIGITS = 9
_HERE = "file"
_INSIDE = "dataset:"


def recognizes(path: Path) -> bool:
    """Return whether a file is HDF5, by its ending or, if it has another one, by its content."""
    if path.suffix in _ENDINGS:
        return not path.is_dir() and not holds_pickle(path)  # whose error names what it would load
    return read_head(path, len(_MAGIC)) == _MAGIC


def dump_step(epoch: Any, step: Any) -> int:
    """Return the step of a dump. Each epoch begins a million later: steps may count from 0 in every epoch.

    >>> dump_step(0, 7), dump_step(2, 7)
    (7, 2000007)
    """
    known = [number if type(number) is int and abs(number) < 1 << 31 else 0 for number in (epoch, step)]
    return known[0] * _EPOCH + known[1]


def open_source(path: Path, summarize: Summarize) -> Hdf5File:
    """Open a file of tensors. They are summarised when the records are first asked for."""
    if not path.exists():
        raise RunNotFound(f"{path} does not exist: no dump to open.")
    with _opened(path) as file:
        attributes = {name: _plain(value) for name, value in file.attrs.items()}
    named = _FILE.search(path.name)
    epoch, step = (int(named[1]), int(named[2])) if named else (0, 0)
    attributes = {"epoch": epoch, "step": step, **attributes}
    info: dict[str, Any] = {"framework": "hdf5", "model": path.name, "world": 1, "config": {}}
    info |= {name: value for name, value in attributes.items() if isinstance(value, _INFO.get(name, object))}
    ranks = _ranks(attributes.get("ranks"))
    info |= {"format": "hdf5", "world": max(info["world"], len(ranks))}
    return Hdf5File(path, info, summarize, ranks)


def _ranks(value: Any) -> list[int]:
    known = isinstance(value, list) and value and all(type(rank) is int and 0 <= rank < 1 << 31 for rank in value)
    return value if known else [0]


class _Dataset(NamedTuple):
    """A dataset that is a tensor."""

    order: int
    place: int
    """Second key of the order."""
    name: str
    key: Key
    cls: str
    rank: int


class Hdf5File(RunSource):
    """Datasets as records. Datasets stored as in memory are read from the file's own bytes."""

    def __init__(self, path: Path, info: Mapping[str, Any], summarize: Summarize, ranks: Sequence[int] = (0,)) -> None:
        super().__init__(path, info, ranks)
        self._summarize = summarize
        self._file = SingleFile(path)
        self._skipped: list[str] = []

    def finished(self) -> bool:
        return bool(self.info.get("complete", True))

    def notices(self) -> list[str]:
        count = sum(len(self.index(rank)) for rank in self.ranks)
        found = []
        if not self.finished():
            reason = shorten(str(self.info.get("reason") or "it is still being written, or was killed"))
            found.append(f"the dump is not complete: {reason}; {count} tensors so far")
        if self._skipped:
            names = ", ".join(map(shorten, self._skipped[:3]))
            found.append(f"{len(self._skipped)} datasets are not tensors that can be read: {names}")
        return found

    def unreadable(self) -> list[str]:
        for rank in self.ranks:
            self.index(rank)
        return self._skipped

    def spellings(self, module: str) -> Sequence[str]:
        """Return a module's name with four digits too: a group is found with any number of them."""
        if (group := _GROUP.fullmatch(module)) is None or len(group[1]) > _MOST_DIGITS:
            return (module,)
        return module, f"{int(group[1]):04d}_{group[2]}"

    def read_index(self, rank: int) -> Index:
        """Read all ranks: finding the datasets takes a walk through the whole file."""
        skipped: list[str] = []
        self._skipped = skipped
        step = dump_step(self.info.get("epoch"), self.info.get("step"))
        with _opened(self.path) as file:
            found = sorted(_datasets(file, step, skipped), key=lambda each: (each.order, each.place))
            for each in self.ranks:
                records = same_tensors(self._records(file, each, found, skipped))
                self._indexes[each] = Index.of_records(records, each, complete=self.finished())
        return self._indexes[rank]

    def view(self, record: Record) -> memoryview:
        location = kept_location(record)
        if not location.file.startswith(_INSIDE):
            return self._file.view(location.file, location.offset, location.nbytes)
        with _opened(self.path) as file:
            return bytes_of_array(_values(file[location.file.removeprefix(_INSIDE)])[0])

    def read(self, record: Record) -> memoryview:
        location = kept_location(record)
        if location.file.startswith(_INSIDE):
            return super().read(record)
        return self._file.read(location.file, location.offset, location.nbytes)

    def address(self, rank: int, file: str) -> str:
        return str(self.path)

    def close(self) -> None:
        super().close()
        self._file.close()

    def _records(self, file: Any, rank: int, found: Sequence[_Dataset], skipped: list[str]) -> Iterator[Record]:
        used: set[Key] = set()
        seq = 0
        for _, _, name, key, cls, own in found:
            if own != rank:
                continue
            dataset = file[name]
            try:
                array, stored_plainly = _values(dataset)
            except Exception:  # strings, tables, damaged or cut off: HDF5 raises anything
                skipped.append(name)
                continue
            offset = dataset.id.get_offset() if stored_plainly else None
            location = Location(_HERE, offset, array.nbytes) if offset else Location(_INSIDE + name, 0, array.nbytes)
            dtype, summary = dtypes.name_of(array.dtype), self._summarize(array)
            yield Record(unique_key(key, used), rank, seq, cls, dtype, array.shape, seq, summary, location)
            seq += 1


def _opened(path: Path) -> Any:
    import h5py  # not before there is a file: every run is asked first whether it is one

    # The library reads the file itself. It must not wait for a FIFO, nor crash this process.
    SingleFile(path).size("")
    if find_damaged([path]):
        raise RunUnreadable(f"{path} is damaged: the HDF5 library crashes or does not end when it reads the file.")
    try:
        return h5py.File(path, "r")
    except PermissionError as error:
        raise RunUnreadable(f"{path} cannot be read, permission denied: {error.strerror}.") from error
    except OSError as error:
        raise RunUnreadable(f"{path} cannot be read as HDF5: {shorten(str(error))}") from error


def _datasets(file: Any, step: int, skipped: list[str]) -> Iterator[_Dataset]:
    """Yield every dataset that is a tensor."""
    import h5py

    names: list[str] = []
    file.visit(names.append)  # follows no links into other files
    for place, name in enumerate(names):
        try:
            name.encode()
            dataset = file[name]
            if not isinstance(dataset, h5py.Dataset):
                continue
            if dataset.external is not None or dataset.is_virtual:  # its values are in files elsewhere
                raise ValueError("its values are in other files")
            attributes = {**_attributes(dataset.parent), **_attributes(dataset)}
        except Exception:  # HDF5 raises anything for a damaged object
            skipped.append(name)
            continue
        if attributes.get("none") or dataset.shape is None:
            continue
        if not dataset.size and "path" not in attributes:  # how older dumps write None
            continue
        try:
            order, key, cls = _identity(name, attributes, step)
            seq = int(attributes["seq"]) if "seq" in attributes else None
            rank = int(attributes.get("rank", 0))
            if not all(abs(number) < 1 << 63 for number in (order, seq or 0, key.step, key.micro, key.call)):
                raise ValueError(name)
        except (TypeError, ValueError, OverflowError):  # not the name or the attributes of a dump
            skipped.append(name)
            continue
        if seq is not None:
            yield _Dataset(seq, 0, name, key, cls, rank)
        else:  # by group; within it as computed, not by name
            later = len(names) if key.kind == "grad_input" else 0
            yield _Dataset(order, place + later, name, key, cls, rank)


def _identity(name: str, attributes: dict[str, Any], step: int) -> tuple[int, Key, str]:
    group, _, leaf = name.rpartition("/")
    if "kind" in attributes:  # an export has the whole identity
        fields = {"step": step, "micro": 0, "phase": "forward", "module": "", "call": 0, "path": "0", **attributes}
        return 0, Key(*(_typed(field, fields[field]) for field in Key._fields)), str(attributes.get("class", ""))
    numbered, known = _GROUP.fullmatch(group), _DATASET.fullmatch(leaf)
    if numbered is None or known is None:
        raise ValueError(name)
    cls = str(attributes.get("class", numbered[2]))
    module = str(attributes.get("module", f"{int(numbered[1]):04d}_{cls}"))
    kind = _KINDS.get(known[1], known[1])
    phase = "backward" if kind.startswith("grad") else "forward"
    path = str(attributes.get("path", known[2] or "0"))
    micro, call = int(attributes.get("micro", 0)), int(attributes.get("call", 0))
    return int(numbered[1]), Key(step, micro, phase, module, call, kind, path), cls


def _typed(field: str, value: Any) -> Any:
    return int(value) if field in ("step", "micro", "call") else str(value)


def _attributes(target: Any) -> dict[str, Any]:
    return {name: _plain(value) for name, value in target.attrs.items()}


def _plain(value: Any) -> Any:
    """Return an attribute as built-in types."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def _values(dataset: Any) -> tuple[Array, bool]:
    """Return the tensor, and whether the file holds it as memory does. Raise KeyError if its type is unknown."""
    attribute = _plain(dataset.attrs.get("dtype", ""))
    stored = dataset.dtype
    name = dtypes.name_of(stored)  # before anything is read: strings and tables may be of any size
    chunk = prod(dataset.chunks or ()) * stored.itemsize
    check_expansion(max(dataset.nbytes, chunk), dataset.id.get_storage_size())
    array: Array = np.asarray(dataset[()])
    if attribute in dtypes.NAMES and dtypes.numpy_dtype(attribute) != stored:
        return recorded(array, attribute), False
    plain = bool(stored.isnative) and dataset.external is None
    return array.astype(dtypes.numpy_dtype(name), copy=False), plain


_INFO: dict[str, type] = {"framework": str, "model": str, "started": str, "world": int, "config": dict}
"""Attributes of the file that other code reads by type. Others are passed on as they are."""
