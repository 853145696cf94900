"""The contract for copies from a device to the host: frameworks send the bytes, the store receives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["DeviceBytes", "MemoryPinning"]


class DeviceBytes(Protocol):
    """Bytes in a device's memory that can be copied to the host asynchronously."""

    size: int

    def copy(self, target: npt.NDArray[np.uint8], start: int) -> Callable[[], None]:
        """Begin to fill `target` with the bytes from `start` on. Return a function that waits for them."""


class MemoryPinning(Protocol):
    """Page-locks host memory, so that a device can write into it asynchronously. Thread-safe."""

    def pin(self, memory: npt.NDArray[np.uint8]) -> None: ...

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Unlock memory that was pinned, as one piece."""
