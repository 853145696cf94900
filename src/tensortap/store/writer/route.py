"""Chooses between the page cache and direct I/O, by their measured rates.

With direct I/O the disk fetches the bytes and no core is busy, which matters if training needs them all. In a virtual
machine, which gets memory slowly, the pages of the cache may also cost more than the disk. A slow disk is better served
through the cache, as long as the cache has room. Both are tried. The slower one is
tried again from time to time, with one write, while others take the faster route.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensortap.core.machine import PORTABLE

__all__ = ["BLOCK", "Route", "supports_direct_io"]

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
        """Number of writes since the last trial."""
        self._trying: bool | None = None
        """The route that a write in progress tries; None without a trial."""

    def use_direct(self) -> bool:
        """Return whether the next write should use direct I/O."""
        with self._lock:
            if not self._possible:
                return False
            best, rest = False, 0
            if self._rates.keys() == {True, False}:
                best = self._rates[True] * self._favour >= self._rates[False]
                # A slower route is tried less often.
                rest = _TRY_AGAIN * max(1, round(self._rates[best] / self._rates[not best]))
            elif True in self._rates:
                return False
            if self._trying is not None or self._turns < rest:
                return best
            self._trying = not best
            return not best

    @contextmanager
    def timed(self, past: bool, nbytes: int) -> Iterator[None]:
        """Time a write, and learn its rate if it succeeds."""
        with self._lock:
            self._abreast[past] += 1
            # While one write tries the cache, all other writes in progress would share it, too.
            abreast = self._abreast[True] if past else sum(self._abreast.values())
        started = time.perf_counter()
        try:
            yield
            self.learn(past, nbytes, time.perf_counter() - started, abreast)
        finally:
            with self._lock:
                self._abreast[past] -= 1

    def learn(self, past: bool, nbytes: int, seconds: float, abreast: int = 1) -> None:
        """Learn from a write, one of `abreast` concurrent writes on the same route. Their joint rate counts: a cache is
        faster with twelve concurrent writes than with one, a disk may not be."""
        with self._lock:
            if self._trying is past:
                self._trying = None
                self._turns = 0
            if nbytes >= _WORTH_TIMING:
                self._turns += 1
                rate = abreast * nbytes / max(seconds, 1e-9)
                self._rates[past] = (self._rates.get(past, rate) + rate) / 2

    def disable_direct(self) -> None:
        """Disable direct I/O: the file system refused it."""
        self._possible = False


def supports_direct_io(folder: Path) -> bool:
    """Return whether the file system opens files for direct I/O."""
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
