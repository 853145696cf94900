"""Groups and datasets in an HDF5 file, for dumps and exports.

A dataset is stored contiguously in a type that plain h5py knows; its attribute `dtype` is the dtype of the tensor.
None is an empty float32 dataset with the attribute `none`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.store.exports.plain import widen
from tensortap.store.format import utf8

__all__ = ["create_file", "link_name", "put", "set_attributes"]


def create_file(path: Path) -> h5py.File:
    """Create a new file in place of an old one. A reader that has the old one open keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return h5py.File(path, "w", track_order=True)  # ten thousand groups no longer sort by name


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
