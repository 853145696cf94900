"""One .npy file: its tensor, or the reason why it cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.errors import RunUnreadable

__all__ = ["map_npy", "read_npy"]

Array = npt.NDArray[Any]


def read_npy(path: Path) -> Array:
    """Read the tensor of a file. Raise RunUnreadable, with the reason alone, if it holds none."""
    try:
        with path.open("rb") as file:  # np.load would also open an archive of several arrays
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RunUnreadable(" ".join(str(error).split()) or type(error).__name__) from error
    try:
        dtypes.name_of(array.dtype)
    except KeyError:
        known = ", ".join(dtypes.NAMES)
        raise RunUnreadable(f"elements of dtype {array.dtype} cannot be compared; known are {known}") from None
    return array


def map_npy(path: Path) -> Array | None:
    """Map the tensor of a file without reading it. None if there is nothing to map."""
    try:
        mapped: Array = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return mapped
