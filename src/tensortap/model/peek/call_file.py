"""One call of one module as an .npz file: its inputs, its outputs and their gradients under short names."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.report.files import output
from tensortap.store.exports.npz_file import CALL, NpzWriter

__all__ = ["CallArrays", "free_path", "write_call"]

Array = npt.NDArray[np.generic]


class CallArrays:
    """The arrays of one call by their names in the file.

    The first tensor of a kind is named by the kind, the others also by their path: `input`, `input_1`, `input_mask`.
    A gradient has the path of the tensor that it belongs to.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.paths: dict[str, str] = {}
        """Name in the file → path."""
        self._first: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.arrays)

    def add(self, kind: str, path: str, array: Array) -> None:
        side = kind.removeprefix("grad_")
        first = self._first.setdefault(side, path)
        name = kind if path == first else f"{kind}_{re.sub(r'[^A-Za-z0-9_.-]', '_', path)}"
        number, unique = 1, name
        while unique in self.arrays:  # a second backward through the same graph
            number += 1
            unique = f"{name}~{number}"
        self.arrays[unique] = array.copy()  # the model may change the tensor in place right after
        self.paths[unique] = path


def write_call(
    path: Path, entries: CallArrays, *, module: str | None = None, cls: str = "", framework: str = ""
) -> None:
    """Write the arrays of one call; an error leaves no partial file.

    The entry `dtypes` is a JSON text with the dtype of each tensor: bfloat16 and float8 are written as float32. The
    archive's comment names the module and the paths, for `tensortap.open`.
    """
    about: dict[str, Any] = {"format": CALL, "version": 1, "class": cls, "framework": framework, "paths": entries.paths}
    names = {name: dtypes.name_of(array.dtype) for name, array in entries.arrays.items()}
    with (
        output.opened(path) as file,
        closing(NpzWriter(file, about if module is None else {**about, "module": module})) as archive,
    ):
        archive.add_text("dtypes", json.dumps(names))
        for name, array in entries.arrays.items():
            archive.add(name, array)


def free_path(path: str | Path) -> Path:
    """Return `file.npz`, or if it exists the first unused of `file.1.npz`, `file.2.npz`, and so on."""
    path = Path(path)
    if path.suffix != ".npz":
        path = path.with_name(path.name + ".npz")
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name.removesuffix('.npz')}.{number}.npz")
    return candidate
