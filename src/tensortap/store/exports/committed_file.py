"""A file for the HDF5 library that stays as it was at the last flush if a later write fails.

The library cannot close a file after a failed write, and may crash the process when it exits. `CommittedFile` therefore
reports no failure to the library. It keeps the error in `failure`, and holds everything that comes later in memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["CommittedFile"]

_ZEROS = bytes(1 << 16)


class CommittedFile:
    """The file object of h5py's driver "fileobj".

    Bytes beyond the end of the last commit go to the file at once: nothing in the file refers to them yet. Changes of
    earlier bytes wait for the next `flush`, which commits them. A full disk fails the first kind, so the file remains
    readable up to the last commit. So it does if the process is killed between two commits.
    """

    def __init__(self, path: Path) -> None:
        self.failure: OSError | None = None
        """The first error. No byte reaches the file after it."""
        self._file = path.open("w+b", buffering=0)
        self._position = 0
        self._size = 0
        self._committed = 0
        self._waiting: dict[tuple[int, int], bytes] = {}
        """(start, length) → bytes, in the order of the writes."""

    # --- what the driver calls ---------------------------------------------------------------------------------
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset if whence == os.SEEK_SET else self._size + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        start, data = self._position, memoryview(data).cast("B")
        self._position = start + len(data)
        self._size = max(self._size, self._position)
        early = min(max(self._committed - start, 0), len(data))
        for first, part in ((start, data[:early]), (start + early, data[early:])):
            if len(part) and (first < self._committed or not self._write_at(first, part)):
                self._waiting.pop((first, len(part)), None)  # a later write also comes later in the order
                self._waiting[first, len(part)] = bytes(part)
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """Not called, but h5py recognises a file object by it."""
        found = bytearray(self._size - self._position if size < 0 else size)
        return bytes(found[: self.readinto(found)])

    def readinto(self, buffer: Any) -> int:
        start, target = self._position, memoryview(buffer).cast("B")
        end = min(start + len(target), self._size)
        target[:] = bytes(len(target))
        self._file.seek(start)
        self._file.readinto(target)
        for (first, length), data in self._waiting.items():
            low, high = max(first, start), min(first + length, end)
            if low < high:
                target[low - start : high - start] = data[low - first : high - first]
        self._position = max(start, end)
        return self._position - start

    def truncate(self, size: int | None = None) -> int:
        size = self._position if size is None else size
        if size > self._size:  # zeros, not a hole: a later change of these bytes needs no room
            self._fill(self._size, size)
        self._size = size
        return size

    def flush(self) -> None:
        """Commit: apply the waiting changes."""
        for (first, _), data in [] if self.failure is not None else list(self._waiting.items()):
            if not self._write_at(first, memoryview(data)):
                return
        if self.failure is None:
            self._waiting.clear()
            self._committed = self._size

    # --- what the owner calls ----------------------------------------------------------------------------------
    def close(self) -> None:
        """Commit, and close the file. Idempotent."""
        if self._file.closed:
            return
        self.flush()
        try:
            if self.failure is None:
                self._file.truncate(self._size)
            self._file.close()
        except OSError as error:  # some file systems report a full disk only here
            self.failure = self.failure or error

    def _fill(self, start: int, end: int) -> None:
        while start < end and self._write_at(start, memoryview(_ZEROS)[: end - start]):
            start += len(_ZEROS)

    def _write_at(self, start: int, data: memoryview) -> bool:
        """Write to the file. Return False, and keep the error, if that fails now or has failed before."""
        if self.failure is not None:
            return False
        try:
            self._file.seek(start)
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self.failure = error
        return self.failure is None
