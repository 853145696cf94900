"""The memory that a block of steps needs, on the device and on the host."""
# mypy: allow-untyped-calls

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from tensortap.core.machine import PORTABLE, memory, read_system_file

__all__ = ["MemoryMeter", "PeakMemory", "available", "device_held", "resident"]

_STATUS = Path("/proc/self/status")
_MACHINE = Path("/proc/meminfo")


@dataclass(frozen=True)
class PeakMemory:
    """Peaks in bytes; those of the device are zero on a CPU."""

    allocated: int
    """Allocated by torch for tensors."""
    reserved: int
    """Reserved by torch's allocator."""
    used: int
    """In use on the device at the end, according to the driver, including other allocators."""
    host: int
    """Resident memory above that at the start of the block."""


class MemoryMeter:
    """Measures the memory of a block of steps: made before it, read after it."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if not PORTABLE:
            with suppress(OSError):  # without permission, or without /proc, the peak of the whole process must suffice
                Path("/proc/self/clear_refs").write_text("5")
        self._before = resident()

    def read(self) -> PeakMemory:
        """Return the peaks. Call it while the tap is open, so that its memory counts."""
        host = max(0, _reported(_STATUS, "VmHWM") - self._before)
        if self._device != "cuda":
            return PeakMemory(0, 0, 0, host)
        free, total = torch.cuda.mem_get_info()
        return PeakMemory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free, host)


def resident() -> int:
    """Return the resident bytes of this process; 0 if the platform does not report them."""
    return _reported(_STATUS, "VmRSS")


def available() -> int:
    """Return the bytes that are available without swapping; 0 if the platform does not report them."""
    return min(_reported(_MACHINE, "MemAvailable"), max(0, memory() - resident()))


def device_held(device: str) -> int:
    """Return the bytes of device memory in use, according to the driver."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _reported(file: Path, word: str) -> int:
    lines = read_system_file(file).splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(word)), 0)
