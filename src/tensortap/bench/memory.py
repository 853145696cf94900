"""What a block of steps needs in memory, on the device and on the host."""
# mypy: allow-untyped-calls

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from tensortap.core.machine import PORTABLE, memory, read_system_file

__all__ = ["Memory", "Meter", "available", "device_held", "resident"]

_STATUS = Path("/proc/self/status")
_MACHINE = Path("/proc/meminfo")


@dataclass(frozen=True)
class Memory:
    """Peaks in bytes. The device's are zero on a CPU."""

    allocated: int
    """By torch's allocator, in tensors."""
    reserved: int
    """By torch's allocator, from the driver."""
    used: int
    """On the device by everyone, as the driver says, at the end: what other allocators took is in it, too."""
    host: int
    """Resident, above what there was when the block began."""


class Meter:
    """Begun before a block of steps, read after it."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if not PORTABLE:
            with suppress(OSError):  # without permission, or without /proc, the peak of the whole process has to do
                Path("/proc/self/clear_refs").write_text("5")
        self._before = resident()

    def read(self) -> Memory:
        """While the tap is still open: what it holds counts."""
        host = max(0, _said(_STATUS, "VmHWM") - self._before)
        if self._device != "cuda":
            return Memory(0, 0, 0, host)
        free, total = torch.cuda.mem_get_info()
        return Memory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free, host)


def resident() -> int:
    """This process's bytes in host memory now."""
    return _said(_STATUS, "VmRSS")


def available() -> int:
    """Bytes that this machine could still hand out without swapping; 0 where it does not say."""
    return min(_said(_MACHINE, "MemAvailable"), max(0, memory() - resident()))


def device_held(device: str) -> int:
    """Bytes of the device's memory that are in use now, as the driver says."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _said(file: Path, word: str) -> int:
    lines = read_system_file(file).splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(word)), 0)
