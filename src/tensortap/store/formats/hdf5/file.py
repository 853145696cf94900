"""HDF5 files of tensors, opened as a run: dumps, exports, and the files that older dumpers left.

A dataset's identity is in attributes of its own, its group's or the file's. A file without any is read by its names:
`018_BatchNorm2d/grad_input0` is a gradient of the module "0018_BatchNorm2d".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.records import Key, Location, Record, Summary
from tensortap.errors import RunNotFound, RunUnreadable
from tensortap.store.exports.plain import recorded
from tensortap.store.format import encode
from tensortap.store.formats.entries import unique_key
from tensortap.store.index import Index
from tensortap.store.run import Run
from tensortap.store.source import Spans

__all__ = ["Hdf5Run", "dump_step", "is_hdf5", "open_hdf5"]

Array = npt.NDArray[Any]
_ENDINGS = (".hdf5", ".h5", ".hdf")
_MAGIC = b"\x89HDF\r\n\x1a\n"
_GROUP = re.compile(r"([0-9]+)_(.*)", re.DOTALL)
_DATASET = re.compile(r"(feat_input|feat_output|grad_input|grad_output)([0-9]*)")
_FILE = re.compile(r"([0-9]+)-epoch_([0-9]+)-step_dump")
_KINDS = {"feat_input": "input", "feat_output": "output"}
_EPOCH = 1_000_000
_HERE = "file"
_INSIDE = "dataset:"


def is_hdf5(path: Path) -> bool:
    """Whether a file is HDF5, by its ending or, if it has another one, by its content."""
    if path.suffix in _ENDINGS or not path.is_file():
        return path.suffix in _ENDINGS and not path.is_dir()
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def dump_step(epoch: Any, step: Any) -> int:
    """The step that a dump counts as. Each epoch begins a million later: steps may count from 0 in every epoch.

    >>> dump_step(0, 7), dump_step(2, 7)
    (7, 2000007)
    """
    known = [number if type(number) is int and abs(number) < 1 << 31 else 0 for number in (epoch, step)]
    return known[0] * _EPOCH + known[1]


def open_hdf5(path: Path, summarize: Callable[[Array], Summary]) -> Hdf5Run:
    """A file of tensors as a run. Tensors are summarised when the records are first asked for."""
    if not path.exists():
        raise RunNotFound(f"{path} does not exist: no dump to open.")
    with _opened(path) as file:
        attributes = {name: _plain(value) for name, value in file.attrs.items()}
    named = _FILE.search(path.name)
    epoch, step = (int(named[1]), int(named[2])) if named else (0, 0)
    attributes = {"epoch": epoch, "step": step, **attributes}
    info = {"format": "hdf5", "world": 1, **{k: v for k, v in attributes.items() if k not in ("format", "version")}}
    ranks = attributes.get("ranks")
    known = isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
    return Hdf5Run(
        path, {"framework": "hdf5", "model": path.name, **info}, summarize, ranks if known and ranks else [0]
    )


class _Found(NamedTuple):
    """A dataset that stands for a tensor."""

    order: int
    place: int
    """Within the order."""
    name: str
    key: Key
    cls: str
    rank: int


class Hdf5Run(Run):
    """Datasets as records. Those stored as they are in memory are read from the file's own bytes, like a run's."""

    on_disk = False  # not all datasets are plain spans of the file

    def __init__(
        self, path: Path, info: dict[str, Any], summarize: Callable[[Array], Summary], ranks: Sequence[int] = (0,)
    ) -> None:
        super().__init__(path, info, sorted(set(ranks)))
        self._summarize = summarize
        self._spans = _Datasets(path)

    @property
    def finished(self) -> bool:
        return bool(self.info.get("complete", True))

    @cached_property
    def notices(self) -> list[str]:
        found = []
        if not self.finished:
            reason = str(self.info.get("reason") or "it is still being written, or was killed")
            found.append(f"the dump is not complete: {reason}; {len(self)} tensors so far")
        skipped = self._read[1]
        if skipped:
            found.append(f"{len(skipped)} datasets are no tensors that can be read: {', '.join(skipped[:3])}")
        return found

    def records(self, *, rank: int | Collection[int] | None = None, **filters: Any) -> Iterator[Record]:
        """The records that pass the filters. A module that is a group is found with any number of digits."""
        module = filters.get("module")
        if isinstance(module, str) and (group := _GROUP.fullmatch(module)) is not None and len(group[1]) < 10:
            filters["module"] = [module, f"{int(group[1]):04d}_{group[2]}"]
        return super().records(rank=rank, **filters)

    def _index(self, rank: int) -> Index:
        if rank not in self.ranks:
            raise RunNotFound(f"{self.path} has no rank {rank}.")
        return self._read[0][rank]

    @cached_property
    def _read(self) -> tuple[dict[int, Index], list[str]]:
        skipped: list[str] = []
        step = dump_step(self.info.get("epoch"), self.info.get("step"))
        indexes = {}
        with _opened(self.path) as file:
            found = sorted(_datasets(file, step, skipped), key=lambda each: (each.order, each.place))
            for rank in self.ranks:
                records = list(self._described(file, rank, found, skipped))
                batches = [encode(records, [r.tensor == r.seq for r in records])] if records else []
                indexes[rank] = Index.of(batches, rank, complete=self.finished)
        return indexes, skipped

    def _described(self, file: Any, rank: int, found: Sequence[_Found], skipped: list[str]) -> Iterator[Record]:
        used: set[Key] = set()
        known: dict[Any, int] = {}
        number = 0
        for _, _, name, key, cls, own in found:
            if own != rank:
                continue
            dataset = file[name]
            try:
                array, stored_plainly = _values(dataset)
            except (KeyError, TypeError, OSError, ValueError):  # strings, tables, damaged or cut off
                skipped.append(name)
                continue
            offset = dataset.id.get_offset() if stored_plainly and dataset.external is None else None
            location = Location(_HERE, offset, array.nbytes) if offset else Location(_INSIDE + name, 0, array.nbytes)
            dtype = dtypes.name_of(array.dtype)
            summary = self._summarize(array)
            # The same bits are taken for the same tensor: that is how what flows from module to module is known. Not
            # where all elements are equal, as in a gradient of zeros.
            tensor = known.setdefault((dtype, array.shape, summary.digest), number)
            tensor = tensor if summary.min != summary.max else number
            yield Record(unique_key(key, used), rank, number, cls, dtype, array.shape, tensor, summary, location)
            number += 1


class _Datasets(Spans):
    """Bytes of datasets: spans of the file itself; or, of those that are stored in another way, as they are read."""

    def view(self, record: Record) -> memoryview:
        span = record.location
        if span is None or not span.file.startswith(_INSIDE):
            return super().view(record)
        return self._bytes(span.file)

    def read(self, record: Record) -> memoryview:
        span = record.location
        if span is None or not span.file.startswith(_INSIDE):
            return super().read(record)
        return memoryview(bytearray(self._bytes(span.file)))

    def path_of(self, rank: int, name: str) -> Path:
        return self._path

    def _bytes(self, name: str) -> memoryview:
        with _opened(self._path) as file:
            array, _ = _values(file[name.removeprefix(_INSIDE)])
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data.toreadonly()


def _opened(path: Path) -> Any:
    import h5py  # not before there is a file: every run is asked first whether it is one

    try:
        return h5py.File(path, "r")
    except PermissionError as error:
        raise RunUnreadable(f"{path} may not be read by you: {error.strerror}.") from error
    except OSError as error:
        raise RunUnreadable(f"{path} cannot be read as HDF5: {error}") from error


def _datasets(file: Any, step: int, skipped: list[str]) -> Iterator[_Found]:
    """Every dataset that stands for a tensor."""
    import h5py

    names: list[str] = []
    file.visit(names.append)  # follows no links into other files
    for place, name in enumerate(names):
        dataset = file[name]
        if not isinstance(dataset, h5py.Dataset):
            continue
        if dataset.external is not None or dataset.is_virtual:  # its values are in files elsewhere
            skipped.append(name)
            continue
        said = {**_attributes(dataset.parent), **_attributes(dataset)}
        if said.get("none") or dataset.shape is None:
            continue
        if not dataset.size and "path" not in said:  # so older dumps say None
            continue
        try:
            order, key, cls = _identity(name, said, step)
            seq = int(said["seq"]) if "seq" in said else None
            rank = int(said.get("rank", 0))
        except (TypeError, ValueError):  # no dump has such a name, or such attributes
            skipped.append(name)
            continue
        if seq is not None:
            yield _Found(seq, 0, name, key, cls, rank)
        else:  # by group; within it as computed, not by name
            later = len(names) if key.kind == "grad_input" else 0
            yield _Found(order, place + later, name, key, cls, rank)


def _identity(name: str, said: dict[str, Any], step: int) -> tuple[int, Key, str]:
    group, _, leaf = name.rpartition("/")
    if "kind" in said:  # an export says it all
        fields = {"step": step, "micro": 0, "phase": "forward", "module": "", "call": 0, "path": "0", **said}
        return 0, Key(*(_typed(field, fields[field]) for field in Key._fields)), str(said.get("class", ""))
    numbered, known = _GROUP.fullmatch(group), _DATASET.fullmatch(leaf)
    if numbered is None or known is None:
        raise ValueError(name)
    cls = str(said.get("class", numbered[2]))
    module = str(said.get("module", f"{int(numbered[1]):04d}_{cls}"))
    kind = _KINDS.get(known[1], known[1])
    phase = "backward" if kind.startswith("grad") else "forward"
    path = str(said.get("path", known[2] or "0"))
    micro, call = int(said.get("micro", 0)), int(said.get("call", 0))
    return int(numbered[1]), Key(step, micro, phase, module, call, kind, path), cls


def _typed(field: str, value: Any) -> Any:
    return int(value) if field in ("step", "micro", "call") else str(value)


def _attributes(target: Any) -> dict[str, Any]:
    return {name: _plain(value) for name, value in target.attrs.items()}


def _plain(value: Any) -> Any:
    """An attribute as Python's own types."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def _values(dataset: Any) -> tuple[Array, bool]:
    """The tensor, and whether it lies in the file as it does in memory. KeyError if it is of no known type."""
    said = _plain(dataset.attrs.get("dtype", ""))
    stored = dataset.dtype
    array: Array = np.asarray(dataset[()])
    if said in dtypes.NAMES and dtypes.numpy_dtype(said) != stored:
        return recorded(array, said), False
    name = dtypes.name_of(stored)
    return array.astype(dtypes.numpy_dtype(name), copy=False), bool(stored.isnative)
