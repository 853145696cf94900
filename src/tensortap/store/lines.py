"""Files of JSON lines beside the index: written before the rows that follow them, readable when torn.

A line is about a subject, and holds from its step on until the next line about it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Hashable, Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from tensortap.core.file_io import BINARY, write_at
from tensortap.store.rotation import RemainingSteps, holding, replace_by_parts
from tensortap.store.segments import read_grown
from tensortap.store.source import Bytes
from tensortap.store.writer.state import WriterState, write_error

__all__ = ["LinesWriter", "read_lines"]

_MOST_WAITING = 1024


class _Line(NamedTuple):
    """The position of a line in the file, and its subject."""

    step: int
    subject: Hashable
    offset: int
    nbytes: int


class LinesWriter:
    """Appends lines to a file. The index calls `write` before each of its batches, so that lines precede the rows.

    With `rotates`, `drop_all_but` may remove lines again.
    """

    several_in_a_step = False
    """Whether a step may have several lines about a subject."""

    def __init__(self, path: Path, state: WriterState, rotates: bool = False) -> None:
        self._path = path
        self._state = state
        self._waiting: list[tuple[int, Hashable, bytes]] = []
        self._end = 0
        """Offset in the file at which the waiting lines belong."""
        self._broken = False
        """Whether a write has failed, and may have left half a line."""
        self._rotates = rotates
        self._lines: list[_Line] = []
        """The lines in the file, if it rotates."""
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # a lock of its own, so that `add_line` never waits for the disk
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
        except OSError as error:
            raise write_error(error, path, begun=False) from error

    def add_line(self, value: Mapping[str, Any], step: int = 0, subject: Hashable = "") -> None:
        """Queue one line. A file that rotates needs its step and its subject."""
        line = json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n"
        with self._lock:
            self._waiting.append((step, subject, line.encode()))
            many = len(self._waiting) >= _MOST_WAITING
        if many:  # few rows follow, if any
            self.write()

    def write(self) -> bool:
        """Write the waiting lines; return False if that fails. An interrupted write is repeated from its start."""
        with self._writing:
            with self._lock:
                if self._broken:  # a line behind half a line could not be read
                    self._waiting.clear()
                    return False
                lines = self._waiting.copy()
            data, end = memoryview(b"".join(line for _, _, line in lines)), self._end
            try:
                while data:
                    written = write_at(self._fd, data, end)
                    data, end = data[written:], end + written
            except OSError as error:
                self._broken = True
                self._state.fail(error, self._path)
                return False
            with self._lock:
                self._waiting = self._waiting[len(lines) :]
            for step, subject, line in lines if self._rotates else ():
                self._lines.append(_Line(step, subject, self._end, len(line)))
                self._end += len(line)
            self._end = end
        return True

    def drop_all_but(self, remaining: RemainingSteps) -> None:
        """Remove the lines that hold in none of these steps. If the disk is full, the file stays as it is."""
        with self._writing:
            kept = self._holding(remaining)
            if len(kept) == len(self._lines):
                return
            try:
                new = replace_by_parts(self._fd, self._path, b"", [(each.offset, each.nbytes) for each in kept])
            except OSError:
                return
            os.close(self._fd)
            self._fd, self._lines, self._end = new, [], 0
            for each in kept:
                self._lines.append(each._replace(offset=self._end))
                self._end += each.nbytes

    def _holding(self, remaining: RemainingSteps) -> list[_Line]:
        by_subject: dict[Hashable, list[_Line]] = {}
        for line in self._lines:
            by_subject.setdefault(line.subject, []).append(line)
        kept: list[_Line] = []
        for lines in by_subject.values():
            kept += compress(lines, holding([line.step for line in lines], remaining, self.several_in_a_step))
        return sorted(kept, key=lambda line: line.offset)

    def close(self) -> None:
        """Write the waiting lines, and close the file."""
        self.write()
        os.close(self._fd)


def read_lines(source: Bytes, name: str) -> Iterator[dict[str, Any]]:
    """Yield the object of each line. Raise ValueError for a line that is none, FileNotFoundError without the file.

    A last line without its end was cut off, and is dropped: no row refers to it.
    """
    whole, _, _ = bytes(read_grown(source, name).data).rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON") from error
        if not isinstance(value, dict):
            raise ValueError(f"line {number} is not an object")
        yield value
