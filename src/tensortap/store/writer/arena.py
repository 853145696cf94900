"""A range of host memory, divided into slabs. It is pinned as a whole if a device writes into it."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from tensortap.core.host_copies import MemoryPinning
from tensortap.core.machine import PORTABLE

__all__ = ["Arena", "Slab"]

Slab = npt.NDArray[np.uint8]

_HUGE = 2 << 20
_HAS_PRIVATE_MAPS = hasattr(mmap, "MAP_PRIVATE") and not PORTABLE
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, which Python does not name


class Arena:
    """`count` adjacent slabs. Slabs of whole pages begin at a page, which direct I/O requires."""

    def __init__(self, count: int, slab_bytes: int, pinning: MemoryPinning | None) -> None:
        nbytes = count * slab_bytes
        self._pinning = pinning
        self._memory = _huge(nbytes) if pinning is not None and _HAS_PRIVATE_MAPS else _plain(nbytes)
        self.slabs: list[Slab] = [self._memory[at : at + slab_bytes] for at in range(0, nbytes, slab_bytes)]
        if pinning is not None:
            pinning.pin(self._memory)

    def release(self) -> None:
        """Unpin the memory. It is unmapped with the last reference to a slab. No device may still write into it."""
        if self._pinning is not None:
            self._pinning.unpin(self._memory)


def _plain(nbytes: int) -> Slab:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def _huge(nbytes: int) -> Slab:
    """Return memory in huge pages where the system has them: allocating, pinning and finding them is much faster.

    Usually only private mappings get them. A private mapping must not be shared with a forked process: the next write
    would copy the page, while the device continues with the original. So a forked process finds it empty.
    """
    region = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (_WIPE_ON_FORK, getattr(mmap, "MADV_HUGEPAGE", 0)):
        with suppress(OSError, AttributeError):  # a system that knows none
            region.madvise(advice)
    whole = np.frombuffer(region, np.uint8)
    first = -whole.ctypes.data % _HUGE
    return whole[first : first + nbytes]
