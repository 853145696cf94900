"""The file of one dump: a numbered group for each forward and backward, flushed so that a kill loses little."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.errors import StoreWriteError
from tensortap.report.wording import clean
from tensortap.store.exports.hdf5_file import create_file, link_name, put, set_attributes

__all__ = ["Array", "DumpFile", "DumpedTensor", "Say", "dump_path", "format_none", "is_finished"]

Array = npt.NDArray[Any]
Say = Callable[[str], None]


class DumpedTensor(NamedTuple):
    """A tensor, or None, to write to a dataset."""

    name: str
    path: str
    """Path within the arguments or outputs."""
    array: Array | None
    seq: int
    """Order in which tensors were seen; those of one group may be far apart."""
    same_as: str = ""
    """The dataset of the group that has the values in place of this one."""


def dump_path(file_path: str | os.PathLike[str], epoch: int, step: int, rank: int = 0) -> Path:
    """Return the path of a dump. A string is a prefix, so a folder ends in "/"; a Path is always a folder."""
    name = f"{epoch}-epoch_{step}-step_dump{f'.rank{rank}' if rank else ''}.hdf5"
    if isinstance(file_path, str):
        return Path(f"{file_path}{name}")
    return Path(file_path) / name


def is_finished(path: Path) -> bool:
    """Return whether a dump exists and is complete. Dumps of other tools have no such mark and count as complete."""
    if not path.exists():
        return False
    try:
        with h5py.File(path, "r") as file:
            return bool(file.attrs.get("complete", True))
    except OSError:  # a killed process may leave a damaged file
        return False


def format_none(same_as: str = "") -> str:
    """Return the text that stands for an empty dataset."""
    return f"None (same as {same_as})" if same_as else "None"


class DumpFile:
    """A dump that is being written. The file's attribute `complete` becomes true when it is closed without an error."""

    def __init__(self, path: Path, attributes: Mapping[str, Any], detail: Say | None = None) -> None:
        self.path = path
        self.groups = 0
        self._ticks = count()
        self._detail = detail
        self._closed = False
        self.failure = ""
        """Why a write failed. The file then ends with the last group that was complete."""
        try:
            self._file = create_file(path)
        except OSError as error:
            reason = error.strerror or error
            raise StoreWriteError(f"{path} could not be created: {reason}; choose another file_path") from error
        set_attributes(self._file, {"format": "tensortap-dump", "version": 1, "complete": False, **attributes})
        self._file.flush()

    def group(self, cls: str, attributes: Mapping[str, Any], datasets: Sequence[DumpedTensor] = ()) -> Any:
        """Create a group with its attributes and first datasets."""
        group = self._file.create_group(f"{self.groups:04d}_{link_name(cls)}", track_order=True)
        first = next((seen.array for seen in reversed(datasets) if seen.array is not None), None)
        dtype = {} if first is None else {"dtype": dtypes.name_of(first.dtype)}
        set_attributes(group, {"class": cls, **attributes, **dtype})
        self.add(group, datasets)
        self.groups += 1
        return group

    def add(self, group: Any, datasets: Sequence[DumpedTensor]) -> None:
        """Add datasets to a group."""
        for name, path, array, seq, same_as in datasets:
            put(group, name, array, {"path": path, "seq": seq} | ({"same_as": same_as} if same_as else {}))
            if self._detail is not None:
                text = format_none(same_as) if array is None else f"{dtypes.name_of(array.dtype)} {list(array.shape)}"
                self._detail(clean(f"  {group.name}/{name}  {text}"))
        try:
            self._file.flush()
        except OSError as error:
            raise self._fail(error) from error

    def tick(self) -> int:
        """Return the next sequence number."""
        return next(self._ticks)

    def contents(self) -> Any:
        """Return the open file for reading: HDF5 cannot open it a second time."""
        return self._file

    def close(self, complete: bool, reason: str = "") -> None:
        if self._closed:
            return
        self._closed = True
        try:
            set_attributes(self._file, {"complete": complete, "reason": reason})
        finally:
            try:
                self._file.close()
            except OSError as error:
                raise self._fail(error) from error

    def _fail(self, error: OSError) -> StoreWriteError:
        """Remember a failed write, and return the exception that reports it."""
        self.failure = error.strerror or str(error)
        return StoreWriteError(f"{self.path} could not be written: {self.failure}; earlier groups are readable")
