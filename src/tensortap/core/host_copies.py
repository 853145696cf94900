"""What capture's two neighbours agree on when bytes come from a device: frameworks send them, the store takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["DeviceBytes", "MemoryPinning"]


class DeviceBytes(Protocol):
    """Bytes in a device's memory, which come to the host by themselves once asked to."""

    size: int

    def copy(self, target: npt.NDArray[np.uint8], start: int) -> Callable[[], None]:
        """Begin to fill `target` with the bytes from `start` on. Returns what waits until they are there."""


class MemoryPinning(Protocol):
    """Makes host memory such that a device can write into it by itself. May be asked by several threads at once."""

    def pin(self, memory: npt.NDArray[np.uint8]) -> None: ...

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """The same memory, as a whole."""
