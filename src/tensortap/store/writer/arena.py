"""A stretch of host memory, cut into slabs. Where a device writes into it, it is page-locked as one piece."""

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
    """`count` slabs side by side. Slabs of whole pages begin at a page: writing past the page cache asks for that."""

    def __init__(self, count: int, slab_bytes: int, pinning: MemoryPinning | None) -> None:
        nbytes = count * slab_bytes
        self._pinning = pinning
        self._memory = _huge(nbytes) if pinning is not None and _HAS_PRIVATE_MAPS else _plain(nbytes)
        self.slabs: list[Slab] = [self._memory[at : at + slab_bytes] for at in range(0, nbytes, slab_bytes)]
        if pinning is not None:
            pinning.pin(self._memory)

    def release(self) -> None:
        """Unlock the memory. It is unmapped once nobody refers to a slab any more; no device may be writing by now."""
        if self._pinning is not None:
            self._pinning.unpin(self._memory)


def _plain(nbytes: int) -> Slab:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def _huge(nbytes: int) -> Slab:
    """Memory in huge pages where the system has them: they are handed out, locked and found by a device many times
    faster. Only private mappings get them, as a rule. A private mapping must not be shared with a forked process, or
    the next to touch it gets a copy, while the device goes on with the original: that process finds it empty."""
    region = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (_WIPE_ON_FORK, getattr(mmap, "MADV_HUGEPAGE", 0)):
        with suppress(OSError, AttributeError):  # a system that knows none
            region.madvise(advice)
    whole = np.frombuffer(region, np.uint8)
    first = -whole.ctypes.data % _HUGE
    return whole[first : first + nbytes]
