"""A bounded pool of slabs: where a tensor's bytes wait for the disk. Slabs are used again, and kept until the end."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from tensortap.sending import Pinning
from tensortap.store.route import BLOCK
from tensortap.store.state import State

__all__ = ["Slab", "SlabPool"]

Slab = npt.NDArray[np.uint8]

_LARGEST = 4 << 20
_LARGEST_PINNED = 16 << 20
_SMALLEST = 64


class SlabPool:
    """Slabs worth at most `nbytes` together. Who asks when all are in use waits: that is the back-pressure.

    Each shard has a pool of its own. With a common one, shards that each hold a slab they have begun to fill
    could starve a shard that holds none.
    """

    def __init__(self, nbytes: int, state: State, pinning: Pinning | None = None) -> None:
        # At least four, so that one is filled while another is written; small ones fit small pools.
        self.slab_bytes = max(_SMALLEST, min(_LARGEST if pinning is None else _LARGEST_PINNED, nbytes // 4))
        if self.slab_bytes > BLOCK:
            self.slab_bytes -= self.slab_bytes % BLOCK
        self._left = max(2, nbytes // self.slab_bytes)
        self._free: list[Slab] = []
        self._pinning = pinning
        self._pinned: list[Slab] = []
        self._state = state
        self.peak = 0
        """Bytes of all slabs that were ever needed at once."""

    def take(self) -> Slab:
        """A slab, waiting for one if need be; raises if the writer has failed meanwhile."""
        with self._state.changed:
            if not self._free and self._left:
                self._left -= 1
                self.peak += self.slab_bytes
                # Pages of their own: writing past the page cache needs aligned memory.
                slab = np.frombuffer(mmap.mmap(-1, self.slab_bytes), np.uint8)
                if self._pinning is not None:
                    self._pinning.pin(slab)
                    self._pinned.append(slab)
                return slab
            self._state.stall_for(lambda: bool(self._free))
            return self._free.pop()

    def give(self, slab: Slab) -> None:
        """Back into the pool. Call with the state's `changed` held, and notify."""
        self._free.append(slab)

    def release(self) -> None:
        """Let go of the memory. Nobody writes into it any more."""
        for slab in self._pinned:
            assert self._pinning is not None
            self._pinning.unpin(slab)
        self._pinned.clear()
        self._free.clear()
