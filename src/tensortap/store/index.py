"""The index as it grows: rows wait a moment, then go out as one Arrow batch, in one write."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tensortap.records import Record
from tensortap.store.format import END_OF_STREAM, SCHEMA, encode
from tensortap.store.state import State, write_error

__all__ = ["IndexWriter"]

BATCH = 256
"""Rows that make a batch worth writing."""
AGE = 1.0
"""Seconds that a row waits at most."""
MOST_WAITING = 4096
"""Rows, of about a kilobyte each, that may wait; who has more waits too."""


class IndexWriter:
    """`barrier` returns True once all bytes that were put so far are written, False if they cannot be."""

    def __init__(self, path: Path, barrier: Callable[[], bool], state: State) -> None:
        self._path = path
        self._barrier = barrier
        self._state = state
        self._seen = _Seen()
        self._thread: threading.Thread | None = None
        # Shared with the thread, under state.changed:
        self._rows: list[Record] = []
        self._oldest = 0.0
        self._urgent = False
        self._stopping = False
        self.appended = 0
        self.written = 0
        self.nbytes = 0
        """Length of the file up to its last whole batch."""
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            self._write(SCHEMA.serialize())
        except OSError as error:
            if self._fd >= 0:
                os.close(self._fd)
            raise write_error(error, path) from error

    def append(self, record: Record) -> None:
        state = self._state
        with state.changed:
            if state.failure is not None or len(self._rows) >= MOST_WAITING:
                state.stall_for(lambda: len(self._rows) < MOST_WAITING)
            self._rows.append(record)
            self.appended += 1
            if len(self._rows) == 1:
                self._oldest = time.monotonic()
                self._start()
            if len(self._rows) in (1, BATCH):
                state.changed.notify_all()

    def hurry(self) -> None:
        """Let what waits go out now; does not wait for it."""
        with self._state.changed:
            self._urgent = bool(self._rows)
            self._state.changed.notify_all()

    def flush(self) -> None:
        """Wait until all rows so far are written."""
        self.hurry()
        with self._state.changed:
            target = self.appended
            self._state.wait_for(lambda: self.written >= target)
        self._state.check()

    def stop(self) -> None:
        """Write what waits, close the stream, and end the thread."""
        with self._state.changed:
            self._stopping = True
            self._state.changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        try:
            if self._state.failure is None:
                self._write(END_OF_STREAM)
        except OSError as error:
            self._state.fail(error, self._path)
        finally:
            os.close(self._fd)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tensortap-index", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        try:
            while (rows := self._next()) and self._barrier():
                first = [self._seen.add(record.tensor) for record in rows]
                self._write(encode(rows, first).serialize())
                with self._state.changed:
                    self.written += len(rows)
                    self._state.changed.notify_all()
        except BaseException as error:  # whatever it is, the caller must learn of it
            self._state.fail(error, self._path)

    def _next(self) -> Sequence[Record]:
        """The next batch, once it is due; none when all is done."""
        changed = self._state.changed
        with changed:
            while not self._stopping and self._state.failure is None:
                left = self._oldest + AGE - time.monotonic()
                if self._rows and (self._urgent or len(self._rows) >= BATCH or left <= 0):
                    break
                changed.wait(left if self._rows else None)
            if self._state.failure is not None:
                return ()
            rows, self._rows = self._rows, []
            self._urgent = False
            changed.notify_all()
            return rows

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            self._cut_off()
            raise
        self.nbytes += len(memoryview(data))

    def _cut_off(self) -> None:
        """Take a half-written batch away again. Readers cope with one, but need not have to."""
        try:
            os.ftruncate(self._fd, self.nbytes)
            os.lseek(self._fd, self.nbytes, os.SEEK_SET)
        except OSError:
            pass  # the first error is the one that counts


class _Seen:
    """Which tensors have been in the index. Numbers that come without gaps take no memory."""

    def __init__(self) -> None:
        self._below = 0
        self._others: set[int] = set()

    def add(self, number: int) -> bool:
        """True if this is the first time."""
        if 0 <= number < self._below or number in self._others:
            return False
        self._others.add(number)
        while self._below in self._others:
            self._others.remove(self._below)
            self._below += 1
        return True
