"""A bounded pool of slabs: where a tensor's bytes wait for the disk. Slabs are used again, and kept until the end."""

from __future__ import annotations

from tensortap.core.host_copies import MemoryPinning
from tensortap.store.writer.arena import Arena, Slab
from tensortap.store.writer.route import BLOCK
from tensortap.store.writer.state import State

__all__ = ["Share", "SlabPool"]

_LARGEST = 4 << 20
_LARGEST_PINNED = 32 << 20
_LARGEST_ARENA = 256 << 20
_SMALLEST = 64
_RIGHT = 2


class SlabPool:
    """Slabs worth at most `nbytes` together, for so many shards. Who asks when all are in use waits: that is the
    back-pressure.

    A shard may hold almost all of them, so that a great tensor can wait for its writer while the caller goes on to the
    next one in another shard. But each shard has a right to two that nobody else can take. Thus none waits for
    another: a shard fills one slab at a time, and what else it holds is with its writer, who will give it back.
    """

    def __init__(self, nbytes: int, shards: int, state: State, pinning: MemoryPinning | None = None) -> None:
        # At least four a shard, so that one is filled while another is written; small ones fit small pools.
        largest = _LARGEST if pinning is None else _LARGEST_PINNED
        self.slab_bytes = max(_SMALLEST, min(largest, nbytes // shards // 4))
        if self.slab_bytes > BLOCK:
            self.slab_bytes -= self.slab_bytes % BLOCK
        # All slabs are in use, free, unmade, or being made by somebody.
        self._unmade = max(_RIGHT * shards, nbytes // self.slab_bytes)
        self._common = self._unmade - _RIGHT * shards
        self._free: list[Slab] = []
        self._arenas: list[Arena] = []
        self._pinning = pinning
        self._state = state
        self.peak = 0
        """Bytes of all slabs that were ever made."""

    def share(self) -> Share:
        """For one shard."""
        return Share(self)

    def take(self, share: Share) -> Slab:
        """See `Share.take`."""
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

    def give(self, share: Share, slab: Slab) -> None:
        """See `Share.give`."""
        self._hold(share, -1)
        self._free.append(slab)

    def release(self) -> None:
        """Let go of the memory. Nobody writes into it any more."""
        for arena in self._arenas:
            arena.release()
        self._arenas.clear()
        self._free.clear()

    def _make(self, share: Share, count: int) -> Slab:
        """Without the lock: memory that is touched and locked for the first time takes long, and writers go on."""
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
        """How many slabs to make. Locking memory is dear, so it is done for many at once, but not for many more than
        were needed so far; memory that is not locked is taken slab by slab."""
        if self._pinning is None:
            return 1
        made = self.peak // self.slab_bytes
        return min(self._unmade, max(_RIGHT, min(made, _LARGEST_ARENA // self.slab_bytes)))

    def _hold(self, share: Share, more: int) -> None:
        before, share.held = share.held, share.held + more
        self._common -= max(0, share.held - _RIGHT) - max(0, before - _RIGHT)


class Share:
    """What one shard has of a pool."""

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self.held = 0
        """Slabs, under the state's lock."""

    def take(self) -> Slab:
        """A slab, waiting for one if need be; raises if the writer has failed meanwhile."""
        return self._pool.take(self)

    def give(self, slab: Slab) -> None:
        """Back into the pool. Call with the state's `changed` held, and notify."""
        self._pool.give(self, slab)
