"""An .npz archive, written one array at a time. Its comment identifies it; `numpy.load` sees arrays only."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.store.exports.plain import widen

__all__ = ["CALL", "NpzWriter"]

CALL = "tensortap-call"
"""The format in the comment of a file that holds one call of a module."""

_LONGEST_COMMENT = (1 << 16) - 1


class NpzWriter:
    """Stores arrays uncompressed, so that a reader can map them; bfloat16 and fp8 as float32."""

    def __init__(self, file: Path | IO[bytes], about: Mapping[str, Any]) -> None:
        self._zip = zipfile.ZipFile(file, "x" if isinstance(file, Path) else "w", zipfile.ZIP_STORED, allowZip64=True)
        comment = json.dumps(about).encode()
        if len(comment) <= _LONGEST_COMMENT:
            self._zip.comment = comment

    def add(self, name: str, array: npt.NDArray[Any]) -> str:
        """Write an array; return the dtype that it has in the file."""
        stored = np.asanyarray(widen(array))
        self._write(name, stored)
        return dtypes.name_of(stored.dtype)

    def add_text(self, name: str, text: str) -> None:
        """Write a text as an array of one string."""
        self._write(name, np.array(text))

    def _write(self, name: str, array: npt.NDArray[Any]) -> None:
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as stream:
            np.lib.format.write_array(stream, array, allow_pickle=False)

    def close(self) -> None:
        self._zip.close()
