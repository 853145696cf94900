"""The speed at which this machine writes files: into the page cache, and directly to the disk."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tensortap.core.file_io import BINARY
from tensortap.core.machine import PORTABLE, cores

__all__ = ["BLOCK", "direct_write", "page_cache_write", "warm_page_cache"]

BLOCK = 16 << 20
_TIME_LIMIT = 4.0
_WARM_UP_LIMIT = 30.0


def warm_page_cache(folder: Path, nbytes: int) -> None:
    """Write and remove files, so that later writes find memory that was touched before.

    A virtual machine gets memory from its host at the first touch, many times slower than later. The memory stays with
    the machine when the files are gone, so `nbytes` should cover all that is in use at a time. One file for each core
    makes it faster.
    """
    if files := min(cores(), nbytes // BLOCK):
        _write(folder, nbytes, files, flags=0, bound=_WARM_UP_LIMIT)


def page_cache_write(folder: Path, nbytes: int, files: int) -> float:
    """Return bytes per second of `files` threads, each with its own file."""
    return max(_write(folder, nbytes, files, flags=0) for _ in range(2))


def direct_write(folder: Path, nbytes: int) -> float | None:
    """Return bytes per second with direct I/O; None if the platform or the file system does not support it."""
    flags = getattr(os, "O_DIRECT", 0)
    if PORTABLE or not flags:
        return None
    try:
        return max(_write(folder, nbytes, files, flags) for files in (1, 4))
    except OSError:
        return None


def _write(folder: Path, nbytes: int, files: int, flags: int, bound: float = _TIME_LIMIT) -> float:
    """Write until all bytes are written or `bound` seconds have passed; return bytes per second."""
    place = folder / "writing"
    place.mkdir(parents=True)
    rounds = max(1, nbytes // files // BLOCK)
    started = time.perf_counter()

    def write(number: int) -> int:
        with _aligned() as block:
            file = os.open(place / f"{number}.bin", os.O_WRONLY | os.O_CREAT | BINARY | flags, 0o600)
            try:
                return _repeated(lambda: os.write(file, block), rounds, started + bound)
            finally:
                os.close(file)

    try:
        with ThreadPoolExecutor(files) as pool:
            written = sum(pool.map(write, range(files)))
        return written / (time.perf_counter() - started)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _repeated(write: Callable[[], int], rounds: int, deadline: float) -> int:
    written = 0
    for _ in range(rounds):
        written += write()
        if time.perf_counter() > deadline:
            break
    return written


class _aligned:  # noqa: N801 - used like a function
    """A page-aligned block of random bytes, which no file system stores as a hole."""

    def __enter__(self) -> mmap.mmap:
        self._map = mmap.mmap(-1, BLOCK)
        self._map.write(os.urandom(1 << 20) * (BLOCK >> 20))
        return self._map

    def __exit__(self, *error: object) -> None:
        with suppress(BufferError):
            self._map.close()
