"""Chooses between the page cache and direct I/O, whichever brings bytes to the disk sooner.

With direct I/O the disk fetches the bytes and no core is busy, which matters if training needs them all. In a virtual
machine, which gets memory slowly, the pages of the cache may also cost more than the disk. A slow disk is better served
through the cache, as long as the cache has room. Both are tried, and the slower one again from time to time: with one
write, while others take the faster route.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensortap.core.machine import PORTABLE

__all__ = ["BLOCK", "Route", "can_go_past"]

BLOCK = 4096
"""Offsets and lengths of direct I/O are multiples of this."""

_WORTH_TIMING = 1 << 20
_TRY_AGAIN = 256


class Route:
    """Decides for all shards of a writer. Direct I/O may be slower by the factor `favour` and still be used."""

    def __init__(self, possible: bool, favour: float) -> None:
        self._possible = possible
        self._favour = favour
        self._lock = threading.Lock()
        self._rates: dict[bool, float] = {}
        self._abreast = {True: 0, False: 0}
        self._turns = 0
        """Writes since one way or the other was tried."""
        self._trying: bool | None = None
        """The way that a write under way tries out."""

    def past(self) -> bool:
        """Whether the next write should go past the cache."""
        with self._lock:
            if not self._possible:
                return False
            best, rest = False, 0
            if self._rates.keys() == {True, False}:
                best = self._rates[True] * self._favour >= self._rates[False]
                # The worse it was, the less often it is tried again.
                rest = _TRY_AGAIN * max(1, round(self._rates[best] / self._rates[not best]))
            elif True in self._rates:
                return False
            if self._trying is not None or self._turns < rest:
                return best
            self._trying = not best
            return not best

    @contextmanager
    def timed(self, past: bool, nbytes: int) -> Iterator[None]:
        """Around a write: learns from it, if it succeeds."""
        with self._lock:
            self._abreast[past] += 1
            # Where one write tries the cache out, all others under way would share it, too.
            abreast = self._abreast[True] if past else sum(self._abreast.values())
        started = time.perf_counter()
        try:
            yield
            self.took(past, nbytes, time.perf_counter() - started, abreast)
        finally:
            with self._lock:
                self._abreast[past] -= 1

    def took(self, past: bool, nbytes: int, seconds: float, abreast: int = 1) -> None:
        """Learn from a write, one of `abreast` that take the same route at a time. Their joint rate counts: a disk that
        is fast with one write may be no faster with twelve, while a cache is."""
        with self._lock:
            if self._trying is past:
                self._trying = None
                self._turns = 0
            if nbytes >= _WORTH_TIMING:
                self._turns += 1
                rate = abreast * nbytes / max(seconds, 1e-9)
                self._rates[past] = (self._rates.get(past, rate) + rate) / 2

    def give_up(self) -> None:
        """The file system refused."""
        self._possible = False


def can_go_past(folder: Path) -> bool:
    """Whether the file system lets files be opened that way."""
    flag = getattr(os, "O_DIRECT", 0)
    if PORTABLE or not flag:
        return False
    probe = folder / f".probe-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | flag, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
