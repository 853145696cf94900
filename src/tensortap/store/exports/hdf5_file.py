"""Groups and datasets in an HDF5 file, for dumps and exports.

A dataset is stored contiguously in a type that plain h5py knows; its attribute `dtype` is the dtype of the tensor.
None is an empty float32 dataset with the attribute `none`.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.store.exports.committed_file import CommittedFile
from tensortap.store.exports.plain import widen
from tensortap.store.format import utf8

__all__ = ["NewFile", "create_file", "link_name", "put", "set_attributes"]


class NewFile(h5py.File):  # type: ignore[misc]
    """An HDF5 file that is being written.

    `flush` and `close` raise the OSError of a write that failed; `close` does so unless `flush` has. The file is then
    as it was at the last flush.
    """

    def __init__(self, path: Path) -> None:
        self._raised = False
        self._bytes = CommittedFile(path)
        super().__init__(self._bytes, "w", track_order=True)  # ten thousand groups no longer sort by name
        # The library closes open files when the process ends, too late to call Python.
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def flush(self) -> None:
        super().flush()
        self._raise_failure()

    def close(self) -> None:
        if not self:
            return
        atexit.unregister(self._at_exit)
        super().close()
        self._bytes.close()
        if not self._raised:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._bytes.failure is not None:
            self._raised = True
            raise self._bytes.failure


def _close_at_exit(file: weakref.ref[NewFile]) -> None:
    if (unclosed := file()) is not None:
        unclosed.close()


def create_file(path: Path) -> NewFile:
    """Create a new file in place of an old one. A reader that has the old one open keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return NewFile(path)


def link_name(name: str) -> str:
    """Return a name as one part of a path in the file: characters with a meaning in HDF5 are percent-encoded."""
    name = utf8(name).replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return "%2E" if name == "." else name or "%"


def set_attributes(target: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        target.attrs[name] = utf8(value).replace("\0", "\\x00") if isinstance(value, str) else value


def put(group: Any, name: str, array: npt.NDArray[Any] | None, attributes: Mapping[str, Any]) -> Any:
    """Write one tensor, or a mark that there was none."""
    if array is None:
        dataset = group.create_dataset(name, shape=(0,), dtype=np.float32)
        set_attributes(dataset, {"none": True, **attributes})
    else:
        dataset = group.create_dataset(name, data=widen(array))
        set_attributes(dataset, {"dtype": dtypes.name_of(array.dtype), **attributes})
    return dataset
