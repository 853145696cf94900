"""The sketches of an index, read in batches. They are most of an index, and a comparison needs few at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.errors import RunUnreadable
from tensortap.store.format import SCHEMA
from tensortap.store.source import Bytes

__all__ = ["ColumnSketches", "FileSketches", "Sketches", "open_columns"]

Ints = npt.NDArray[np.int64]
Matrix = npt.NDArray[np.float32]
_MOST_READ = 16 << 20
"""Bytes of sketches that stay in memory after they were used."""


def open_columns(stream: Any, fields: list[int]) -> Any:
    """Open a stream for some of its columns. Threads that unpack them would compete with a training for the cores."""
    return pa.ipc.open_stream(stream, options=pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields))


class Sketches:
    """Sketches by row. Subclasses read the batch of a number as an Arrow array of lists, null where a row has none."""

    def __init__(self, ends: Sequence[int]) -> None:
        """`ends` has for each batch the number of rows up to its end."""
        self._ends = np.asarray(ends, np.int64)
        self._read: OrderedDict[int, tuple[Matrix, Ints]] = OrderedDict()
        self._bytes_read = 0

    def _batch(self, number: int) -> Any:
        raise NotImplementedError

    def column(self) -> Any:
        """Return the sketches of all rows."""
        return pa.chunked_array([self._batch(number) for number in range(len(self._ends))], SCHEMA.field("sketch").type)

    def having(self, tensors: Ints) -> Ints:
        """Return the rows that have a sketch. `tensors` has the number of each row's tensor."""
        return np.flatnonzero(self.column().is_valid().to_numpy())

    def size(self, row: int) -> int:
        """Return the number of sums in the sketch of a row; 0 if it has none."""
        return int(self.at(np.array([row])).shape[1])

    def at(self, rows: Ints) -> Matrix:
        """Return the sketches of rows as a matrix, NaN where a row has none."""
        batches = np.searchsorted(self._ends, rows, "right")
        if len(rows) and (batches == batches[0]).all():
            return self._at(int(batches[0]), rows)
        found: Matrix | None = None
        for number in np.unique(batches).tolist():
            here = np.flatnonzero(batches == number)
            matrix = self._at(number, rows[here])
            if found is None or found.shape[1] < matrix.shape[1]:
                wider = np.full((len(rows), matrix.shape[1]), np.nan, np.float32)
                if found is not None and found.shape[1]:
                    wider[:, : found.shape[1]] = found
                found = wider
            if matrix.shape[1]:
                found[here] = matrix
        return np.empty((len(rows), 0), np.float32) if found is None else found

    def _at(self, number: int, rows: Ints) -> Matrix:
        """Return the sketches of rows of one batch."""
        matrix, which = self._unpacked(number)
        places = which[rows - (int(self._ends[number - 1]) if number else 0)]
        if not matrix.size:
            return np.full((len(rows), matrix.shape[1]), np.nan, np.float32)
        found = matrix[places]
        if (places < 0).any():
            found[places < 0] = np.nan
        return found

    def release(self) -> None:
        """Release the batches that were read; later requests read them again."""
        self._read.clear()
        self._bytes_read = 0

    def _unpacked(self, number: int) -> tuple[Matrix, Ints]:
        """Return the sketches of a batch, and which of them each row has; -1 if none."""
        if number not in self._read:
            column = self._batch(number)
            valid = np.asarray(column.is_valid().to_numpy(zero_copy_only=False))
            flat = column.flatten().to_numpy()
            count = int(np.count_nonzero(valid))
            which = np.where(valid, np.cumsum(valid) - 1, -1)
            self._read[number] = (flat.reshape(count, -1) if count else np.empty((0, 0), np.float32), which)
            self._bytes_read += self._read[number][0].nbytes
        self._read.move_to_end(number)
        while len(self._read) > 2 and self._bytes_read > _MOST_READ:
            self._bytes_read -= self._read.popitem(last=False)[1][0].nbytes
        return self._read[number]


class ColumnSketches(Sketches):
    """Sketches that are in memory, or that a format reads at once."""

    def __init__(self, count: int, read: Callable[[], Any]) -> None:
        super().__init__([count])
        self._reading = read
        self._column: Any = None

    def column(self) -> Any:
        if self._column is None:
            self._column = self._reading()
            self._ends = np.cumsum([len(chunk) for chunk in self._column.chunks], dtype=np.int64)
        return self._column

    def at(self, rows: Ints) -> Matrix:
        self.column()
        return super().at(rows)

    def _batch(self, number: int) -> Any:
        return self.column().chunk(number)


class FileSketches(Sketches):
    """Sketches of an index file, which stays closed in between: its batches are found by their positions."""

    def __init__(self, source: Bytes, name: str, head: int, batches: Sequence[tuple[int, int, int]]) -> None:
        """`head` is where the schema ends; `batches` has begin, end and number of rows of each."""
        super().__init__(list(accumulate(rows for _, _, rows in batches)))
        self._source, self._name = source, name
        self._head = bytes(source.view(name, 0, head))
        self._batches = [(begin, end) for begin, end, _ in batches]

    def having(self, tensors: Ints) -> Ints:
        """The first row of each tensor brings its sketch."""
        return np.sort(np.unique(tensors, return_index=True)[1])

    def _batch(self, number: int) -> Any:
        begin, end = self._batches[number]
        try:
            # First its schema, which counts the steps that a ring has dropped: a new file may be shorter.
            if self._source.view(self._name, 0, len(self._head)) != self._head:
                raise RunUnreadable(f"{self._source.address(self._name)} was replaced meanwhile: open the run again.")
            content = self._head + bytes(self._source.view(self._name, begin, end - begin))
            reader = open_columns(pa.BufferReader(content), [SCHEMA.get_field_index("sketch")])
            batch = reader.read_next_batch()
            batch.validate(full=True)
        except (OSError, StopIteration, pa.ArrowException) as error:
            raise RunUnreadable(
                f"{self._source.address(self._name)} is damaged: its sketches cannot be read."
            ) from error
        finally:
            self._source.release_pages()
        return batch.column(0)
