"""The file of one dump: a group for each firing, numbered in order; flushed after each, so that a kill costs little."""

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

__all__ = ["Array", "DumpFile", "Say", "Seen", "is_finished", "none", "path_of"]

Array = npt.NDArray[Any]
Say = Callable[[str], None]


class Seen(NamedTuple):
    """A tensor, or None, on its way into a dataset."""

    name: str
    path: str
    """Where in the arguments it sits."""
    array: Array | None
    seq: int
    """When it was seen: datasets of one group may have been seen far apart."""
    same_as: str = ""
    """The dataset of the group that holds what would be here."""


def path_of(file_path: str | os.PathLike[str], epoch: int, step: int, rank: int = 0) -> Path:
    """Where a dump goes. A string is a prefix, so a folder ends in "/"; a Path is always a folder."""
    name = f"{epoch}-epoch_{step}-step_dump{f'.rank{rank}' if rank else ''}.hdf5"
    if isinstance(file_path, str):
        return Path(f"{file_path}{name}")
    return Path(file_path) / name


def is_finished(path: Path) -> bool:
    """Whether a dump exists that nobody is still writing. Dumps of other tools do not say; they count as finished."""
    if not path.exists():
        return False
    try:
        with h5py.File(path, "r") as file:
            return bool(file.attrs.get("complete", True))
    except OSError:  # damaged, as a killed process may leave it
        return False


def none(same_as: str = "") -> str:
    """How the screen says that a dataset is empty."""
    return f"None (same as {same_as})" if same_as else "None"


class DumpFile:
    """An open dump. The attribute `complete` of the file is true only once it was closed in order."""

    def __init__(self, path: Path, attributes: Mapping[str, Any], detail: Say | None = None) -> None:
        self.path = path
        self.groups = 0
        self._ticks = count()
        self._detail = detail
        self._closed = False
        try:
            self._file = create_file(path)
        except OSError as error:
            raise StoreWriteError(f"{path} could not be created: {error}") from error
        set_attributes(self._file, {"format": "tensortap-dump", "version": 1, "complete": False, **attributes})
        self._file.flush()

    def group(self, cls: str, attributes: Mapping[str, Any], datasets: Sequence[Seen] = ()) -> Any:
        """A new group with all that is known by now."""
        group = self._file.create_group(f"{self.groups:04d}_{link_name(cls)}", track_order=True)
        self.groups += 1
        first = next((seen.array for seen in reversed(datasets) if seen.array is not None), None)
        dtype = {} if first is None else {"dtype": dtypes.name_of(first.dtype)}
        set_attributes(group, {"class": cls, **attributes, **dtype})
        self.add(group, datasets)
        return group

    def add(self, group: Any, datasets: Sequence[Seen]) -> None:
        """More datasets of a group."""
        for name, path, array, seq, same_as in datasets:
            put(group, name, array, {"path": path, "seq": seq} | ({"same_as": same_as} if same_as else {}))
            if self._detail is not None:
                said = none(same_as) if array is None else f"{dtypes.name_of(array.dtype)} {list(array.shape)}"
                self._detail(clean(f"  {group.name}/{name}  {said}"))
        self._file.flush()

    def tick(self) -> int:
        """The number of the next sighting."""
        return next(self._ticks)

    def contents(self) -> Any:
        """The open file, for reading: HDF5 lets no one else in meanwhile."""
        return self._file

    def close(self, complete: bool, reason: str = "") -> None:
        if self._closed:
            return
        self._closed = True
        try:
            set_attributes(self._file, {"complete": complete, "reason": reason})
        finally:
            self._file.close()
