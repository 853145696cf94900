"""Files of JSON lines beside the index: written before the rows that follow them, readable when torn."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensortap.core.file_io import BINARY, write_at
from tensortap.store.source import Bytes
from tensortap.store.writer.state import WriterState, write_error

__all__ = ["LinesWriter", "read_lines"]

_MOST_WAITING = 1024


class LinesWriter:
    """Appends lines to a file. The index calls `write` before each of its batches, so that lines precede the rows."""

    def __init__(self, path: Path, state: WriterState) -> None:
        self._path = path
        self._state = state
        self._waiting: list[str] = []
        self._end = 0
        """Offset in the file at which the waiting lines belong."""
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # a lock of its own, so that `add_line` never waits for the disk
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
        except OSError as error:
            raise write_error(error, path, begun=False) from error

    def add_line(self, value: Mapping[str, Any]) -> None:
        """Queue one line."""
        line = json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n"
        with self._lock:
            self._waiting.append(line)
            many = len(self._waiting) >= _MOST_WAITING
        if many:  # few rows follow, if any
            self.write()

    def write(self) -> bool:
        """Write the waiting lines; return False if that fails. An interrupted write is repeated from its start."""
        with self._writing:
            with self._lock:
                if self._state.failure is not None:  # a line behind half a line could not be read
                    self._waiting.clear()
                    return False
                lines = self._waiting.copy()
            data, end = memoryview("".join(lines).encode()), self._end
            try:
                while data:
                    written = write_at(self._fd, data, end)
                    data, end = data[written:], end + written
            except OSError as error:
                self._state.fail(error, self._path)
                return False
            with self._lock:
                self._waiting, self._end = self._waiting[len(lines) :], end
        return True

    def close(self) -> None:
        """Write the waiting lines, and close the file."""
        self.write()
        os.close(self._fd)


def read_lines(source: Bytes, name: str) -> Iterator[dict[str, Any]]:
    """Yield the object of each line. Raise ValueError for a line that is none, FileNotFoundError without the file.

    A last line without its end was cut off, and is dropped: no row refers to it.
    """
    whole, _, _ = bytes(source.read(name, 0, source.size(name))).rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON") from error
        if not isinstance(value, dict):
            raise ValueError(f"line {number} is not an object")
        yield value
