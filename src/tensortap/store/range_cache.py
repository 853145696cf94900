"""Ranges of remote objects that were read, for the case that they are read again: in memory, or on disk if asked.

TENSORTAP_CACHE names a folder for a cache on disk, which all processes share and which outlives them;
TENSORTAP_CACHE_SIZE bounds its bytes. An object is found again only if its size and version are the same.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tensortap.errors import UsageError

__all__ = ["DiskCache", "MemoryCache", "RangeCache", "disk_cache"]

_IN_MEMORY = 128 << 20
_ON_DISK = 16 << 30


class RangeCache(Protocol):
    """Keeps ranges of objects, and forgets those that were not used for longest. Any thread may call it."""

    def get(self, name: str, offset: int, nbytes: int) -> memoryview | None:
        """Return a range, if one that was added contains it."""

    def add(self, name: str, offset: int, data: bytes) -> None:
        """Keep a range."""


class MemoryCache:
    """At most `most` bytes in memory."""

    def __init__(self, most: int = _IN_MEMORY) -> None:
        self._most = most
        self._held = 0
        self._ranges: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._begins: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def get(self, name: str, offset: int, nbytes: int) -> memoryview | None:
        with self._lock:
            begins = self._begins.get(name, [])
            for begin in begins[bisect_right(begins, offset) - 1 :: -1] if begins and begins[0] <= offset else ():
                data = self._ranges[name, begin]
                if begin + len(data) >= offset + nbytes:
                    self._ranges.move_to_end((name, begin))
                    return memoryview(data)[offset - begin : offset - begin + nbytes]
        return None

    def add(self, name: str, offset: int, data: bytes) -> None:
        if len(data) > self._most:
            return
        with self._lock:
            self._drop(name, offset)
            self._ranges[name, offset] = data
            insort(self._begins.setdefault(name, []), offset)
            self._held += len(data)
            while self._held > self._most:
                self._drop(*next(iter(self._ranges)))

    def clear(self) -> None:
        with self._lock:
            self._ranges.clear()
            self._begins.clear()
            self._held = 0

    def _drop(self, name: str, offset: int) -> None:
        data = self._ranges.pop((name, offset), None)
        if data is not None:
            self._held -= len(data)
            self._begins[name].remove(offset)
            if not self._begins[name]:
                del self._begins[name]


class DiskCache:
    """At most about `most` bytes in a folder: a folder for each object, and a file for each range of it."""

    def __init__(self, folder: Path, most: int = _ON_DISK) -> None:
        self._folder = folder
        self._most = most
        self._added = most  # the first addition counts what is there
        self._lock = threading.Lock()

    def get(self, name: str, offset: int, nbytes: int) -> memoryview | None:
        folder = self._folder_of(name)
        with suppress(OSError):
            for entry in os.listdir(folder):  # noqa: PTH208  # only names are needed
                begin, _, end = entry.partition("-")
                if begin.isdecimal() and end.isdecimal() and int(begin) <= offset and offset + nbytes <= int(end):
                    data = (folder / entry).read_bytes()
                    if len(data) == int(end) - int(begin):
                        os.utime(folder / entry)
                        return memoryview(data)[offset - int(begin) : offset - int(begin) + nbytes]
        return None

    def add(self, name: str, offset: int, data: bytes) -> None:
        """Keep a range, if the disk has room: a cache that cannot be written is no reason to fail."""
        if len(data) > self._most // 4:
            return
        folder = self._folder_of(name)
        partial = folder / f".{secrets.token_hex(6)}.partial"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.write_bytes(data)
            partial.replace(folder / f"{offset}-{offset + len(data)}")
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            return
        with self._lock:
            self._added += len(data)
            if self._added > self._most // 8:
                self._added = 0
                self._shrink()

    def _shrink(self) -> None:
        """Delete the ranges that were not used for longest, until the rest is within the bound."""
        found = []
        for path in self._folder.glob("*/*"):
            with suppress(OSError):
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        held = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if held <= self._most * 7 // 8:
                break
            with suppress(OSError):
                path.unlink()
                held -= size

    def _folder_of(self, name: str) -> Path:
        return self._folder / hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def disk_cache() -> DiskCache | None:
    """Return the cache on disk that the environment asks for."""
    folder, size = os.environ.get("TENSORTAP_CACHE", ""), os.environ.get("TENSORTAP_CACHE_SIZE", "")
    if not folder:
        return None
    if size and not size.isdecimal():
        raise UsageError(f"TENSORTAP_CACHE_SIZE: {size!r} is not a number of bytes")
    return DiskCache(Path(folder), int(size) if size else _ON_DISK)
