"""The file of an index: an Arrow IPC stream that grows by whole batches, and from which a ring drops old steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from tensortap.core.file_io import BINARY
from tensortap.store.format import END_OF_STREAM, index_schema
from tensortap.store.rotation import DroppedSteps, RemainingSteps, replace_by_parts
from tensortap.store.writer.state import write_error

__all__ = ["IndexFile"]

_LEAST_GARBAGE = 64 << 10
"""Bytes of dropped batches that are worth a new file."""


class _Batch(NamedTuple):
    """The position of a batch in the file, and its newest step."""

    step: int
    offset: int
    nbytes: int
    rows: int


class IndexFile:
    """Writes the batches of an index to a file, with compressed buffers.

    LZ4, because it costs the least: about 2 µs a row, a fraction of encoding it. No further thread takes part, since
    the training may need every core.

    Dropped batches stay in the file until they are half of it. Then a file without them takes its place, and `rotated`
    is called with the steps that remain. So the cost of a row stays constant, and the file is bounded.
    """

    def __init__(
        self, path: Path, rotates: bool = False, rotated: Callable[[RemainingSteps], None] = lambda _: None
    ) -> None:
        self.path = path
        self.nbytes = 0
        self.dropped_rows = 0
        self._rotates = rotates
        self._rotated = rotated
        self._batches: list[_Batch] = []
        self._sizes: dict[int, int] = {}
        """Bytes of the batches of each step."""
        self._dropping: set[int] = set()
        """Steps whose batches go with the next rotation."""
        self._dropped = DroppedSteps(0, -1)
        self._patience = _LEAST_GARBAGE
        self._fd = -1
        self._options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
            schema = index_schema().serialize().to_pybytes()
            self._write(schema)  # at once: Arrow would wait for the first batch, which may never come
        except OSError as error:
            if self._fd >= 0:
                os.close(self._fd)
            raise write_error(error, path, begun=False) from error

    def write(self, batch: Any) -> None:
        begin = self.nbytes
        self._write(self._message(batch))
        if self._rotates and batch.num_rows:
            step = pa.compute.max(batch.column("step")).as_py()
            self._batches.append(_Batch(step, begin, self.nbytes - begin, batch.num_rows))
            self._sizes[step] = self._sizes.get(step, 0) + self.nbytes - begin

    def drop(self, step: int) -> None:
        self._dropping.add(step)
        self._rotate(least=self._patience)

    def close(self, complete: bool) -> None:
        try:
            if complete:
                if self._rotates:
                    self._rotate(least=1)
                self._write(END_OF_STREAM)
        finally:
            os.close(self._fd)

    def _rotate(self, least: int) -> None:
        """Replace the file by one without the dropped batches, if they are half of it and have `least` bytes."""
        dropping = self._dropping
        garbage = sum(self._sizes.get(step, 0) for step in dropping)
        if garbage < least or (2 * garbage < self.nbytes and least > 1):
            return
        kept = [each for each in self._batches if each.step not in dropping]
        dropped = DroppedSteps(self._dropped.number + len(dropping), max(self._dropped.last, *dropping))
        head = index_schema().with_metadata({**index_schema().metadata, **dropped.metadata()}).serialize().to_pybytes()
        try:
            new = replace_by_parts(self._fd, self.path, head, [(each.offset, each.nbytes) for each in kept])
        except OSError:  # the file may stay as it is: a full disk has no room for a second one
            self._patience = 2 * garbage
            os.lseek(self._fd, self.nbytes, os.SEEK_SET)
            return
        os.close(self._fd)
        self._fd, self._dropped, self._patience = new, dropped, _LEAST_GARBAGE
        self.dropped_rows += sum(each.rows for each in self._batches) - sum(each.rows for each in kept)
        self._sizes = {step: size for step, size in self._sizes.items() if step not in dropping}
        self._batches, self.nbytes = [], len(head)
        for each in kept:
            self._batches.append(each._replace(offset=self.nbytes))
            self.nbytes += each.nbytes
        os.lseek(self._fd, self.nbytes, os.SEEK_SET)
        self._dropping = set()
        self._rotated(RemainingSteps({each.step for each in kept}, dropped.last))

    def _message(self, batch: Any) -> memoryview:
        """Return the batch as Arrow writes it, by a stream of its own: a sink in Python is called for each buffer."""
        sink = pa.BufferOutputStream()
        pa.ipc.new_stream(sink, batch.schema, options=self._options).write_batch(batch)
        return memoryview(sink.getvalue())[batch.schema.serialize().size :]

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            self._cut_off()
            raise
        self.nbytes += len(data)

    def _cut_off(self) -> None:
        """Remove a half-written batch. Readers tolerate one, but need not see it."""
        with suppress(OSError):  # the first error is the one that counts
            os.ftruncate(self._fd, self.nbytes)
            os.lseek(self._fd, self.nbytes, os.SEEK_SET)
