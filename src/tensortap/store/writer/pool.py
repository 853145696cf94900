"""A bounded pool of slabs, the buffers in which bytes wait for the disk. Slabs are reused, and kept until the end."""

from __future__ import annotations

from tensortap.core.host_copies import MemoryPinning
from tensortap.store.writer.arena import Arena, Slab
from tensortap.store.writer.route import BLOCK
from tensortap.store.writer.state import WriterState

__all__ = ["SlabPool", "SlabShare"]

_LARGEST = 4 << 20
_LARGEST_PINNED = 32 << 20
_LARGEST_ARENA = 256 << 20
_SMALLEST = 64
_RIGHT = 2


class SlabPool:
    """Slabs of at most `nbytes` together, for a number of shards. `take` waits while all are in use: back-pressure.

    A shard may hold almost all slabs, so that a large tensor can wait for its writer while the caller continues with
    another shard. Two slabs of each shard are reserved for it. So no shard waits for another: it fills one slab at a
    time, and its writer returns all others that it holds.
    """

    def __init__(self, nbytes: int, shards: int, state: WriterState, pinning: MemoryPinning | None = None) -> None:
        # At least four a shard, so that one is filled while another is written; small ones fit small pools.
        largest = _LARGEST if pinning is None else _LARGEST_PINNED
        self.slab_bytes = max(_SMALLEST, min(largest, nbytes // shards // 4))
        if self.slab_bytes > BLOCK:
            self.slab_bytes -= self.slab_bytes % BLOCK
        # Each slab is in use, free, not yet allocated, or being allocated.
        self._unmade = max(_RIGHT * shards, nbytes // self.slab_bytes)
        self._common = self._unmade - _RIGHT * shards
        self._free: list[Slab] = []
        self._arenas: list[Arena] = []
        self._pinning = pinning
        self._state = state
        self.peak = 0
        """Bytes of all slabs allocated so far."""

    def share(self) -> SlabShare:
        """Return the share of one shard."""
        return SlabShare(self)

    def take(self, share: SlabShare) -> Slab:
        """See `SlabShare.take`."""
        with self._state.changed:
            self._state.stall_for(
                lambda: (share.held < _RIGHT or self._common > 0) and bool(self._free or self._unmade)
            )
            self._hold(share, 1)
            if self._free:
                return self._free.pop()
            count = self._next_arena()
            self._unmade -= count
            self.peak += count * self.slab_bytes
        return self._make(share, count)

    def give(self, share: SlabShare, slab: Slab) -> None:
        """See `SlabShare.give`."""
        self._hold(share, -1)
        self._free.append(slab)

    def release(self) -> None:
        """Free the memory. No thread or device may still write into it."""
        for arena in self._arenas:
            arena.release()
        self._arenas.clear()
        self._free.clear()

    def _make(self, share: SlabShare, count: int) -> Slab:
        """Allocate without the lock: touching and pinning new memory takes long, and writers continue meanwhile."""
        changed = self._state.changed
        try:
            arena = Arena(count, self.slab_bytes, self._pinning)
        except BaseException:
            with changed:
                self._hold(share, -1)
                self._unmade += count
                self.peak -= count * self.slab_bytes
                changed.notify_all()
            raise
        first, *others = arena.slabs
        with changed:
            self._arenas.append(arena)
            self._free += others
            changed.notify_all()
        return first

    def _next_arena(self) -> int:
        """Return the number of slabs to allocate. Pinning is expensive, so several are pinned at once, at most doubling
        the number so far. Memory that is not pinned is allocated slab by slab.
        """
        if self._pinning is None:
            return 1
        made = self.peak // self.slab_bytes
        return min(self._unmade, max(_RIGHT, min(made, _LARGEST_ARENA // self.slab_bytes)))

    def _hold(self, share: SlabShare, more: int) -> None:
        before, share.held = share.held, share.held + more
        self._common -= max(0, share.held - _RIGHT) - max(0, before - _RIGHT)


class SlabShare:
    """The slabs of a pool that one shard holds."""

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self.held = 0
        """Slabs, under the state's lock."""

    def take(self) -> Slab:
        """Return a slab, waiting for one if necessary; raise if the writer has failed."""
        return self._pool.take(self)

    def give(self, slab: Slab) -> None:
        """Return a slab to the pool. Call with the state's `changed` held, and notify."""
        self._pool.give(self, slab)
