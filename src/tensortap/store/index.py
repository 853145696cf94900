"""The index of one rank, read back: memory-mapped, batch by batch, up to the first one that is not whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.core.records import Key, Record
from tensortap.errors import RunUnreadable
from tensortap.store.format import (
    END_OF_STREAM,
    SCHEMA,
    check_version,
    decode,
    unknown_columns,
    with_known_columns,
)

__all__ = ["Index"]


class Index:
    """Rows of one rank, in order of `seq`."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self.lost = 0
        """Bytes at the end of the file that are no whole batch."""
        self.missing = False
        self.unknown: list[str] = []
        """Columns of the file that this process does not know: statistics that are registered elsewhere."""
        self.complete = False
        """Whether the writer closed the stream."""
        try:
            self.rows = _in_order(self._read(path))
        except (OSError, pa.ArrowException) as error:
            raise RunUnreadable(f"{path} cannot be read: {error}") from error

    @classmethod
    def of(cls, batches: Sequence[Any], rank: int, complete: bool = True) -> Index:
        """Return the index of Arrow batches that are in memory already."""
        index = cls.__new__(cls)
        index.rank, index.lost, index.missing, index.complete, index.unknown = rank, 0, False, complete, []
        index.rows = _in_order(_table(batches, batches[0].schema if batches else SCHEMA))
        return index

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def records(self, places: npt.NDArray[np.int64]) -> list[Record]:
        """The records of those rows."""
        rows = _taken(self.rows.drop_columns("sketch"), places)
        sketches = self.rows.column("sketch")
        sources = self.sketch_rows[places]
        found = [sketches[int(row)].values.to_numpy() if row >= 0 else _NO_SKETCH for row in sources]
        return decode(rows, self.rank, found)

    @cached_property
    def sketch_rows(self) -> npt.NDArray[np.int64]:
        """For each row, the row that has its tensor's sketch; -1 if none has."""
        if not len(self):
            return np.empty(0, np.int64)
        tensors = self.rows.column("tensor").to_numpy()
        having = np.flatnonzero(self.rows.column("sketch").is_valid().to_numpy())
        if not having.size:
            return np.full(len(self), -1)
        numbers, first = np.unique(tensors[having], return_index=True)
        spot = np.minimum(np.searchsorted(numbers, tensors), numbers.size - 1)
        return np.where(numbers[spot] == tensors, having[first[spot]], -1)

    @cached_property
    def steps(self) -> npt.NDArray[np.int64]:
        return np.asarray(self.rows.column("step").to_numpy())

    def keys_of_step(self, step: int) -> dict[Key, int]:
        """The rows of a step by their key; the first, should there be several."""
        places = np.flatnonzero(self.steps == step)
        columns = self.rows.select(list(Key._fields)).take(pa.array(places)).to_pydict()
        keys = zip(*columns.values(), strict=True)
        result: dict[Key, int] = {}
        for key, place in zip(keys, places.tolist(), strict=True):
            result.setdefault(Key(*key), place)
        return result

    def _read(self, path: Path) -> Any:
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            self.missing = True
            size = 0
        if not size:
            return _table([])
        source = pa.memory_map(str(path))
        batches: list[Any] = []
        end = 0
        try:
            stream = pa.ipc.open_stream(source)
            _check_version(stream.schema, path)
            if (unknown := unknown_columns(stream.schema)) is None:
                raise RunUnreadable(f"{path} is damaged: it has not the columns of an index.")
            self.unknown = unknown
            end = source.tell()
            while True:
                batch = stream.read_next_batch()
                batch.validate(full=True)  # what a damaged disk returns must not crash whoever looks at it
                batches.append(batch)
                end = source.tell()
        except StopIteration:
            source.seek(end)
            self.complete = source.read(len(END_OF_STREAM)) == END_OF_STREAM
            end += len(END_OF_STREAM) if self.complete else 0
        except (OSError, pa.ArrowException):
            pass  # the rest is no whole batch
        self.lost = size - end
        return _table(batches, batches[0].schema if batches else SCHEMA)


def _table(batches: Sequence[Any], schema: Any = SCHEMA) -> Any:
    return with_known_columns(pa.Table.from_batches(batches, schema))


def _check_version(schema: Any, path: Path) -> None:
    """Before its columns are looked at: those of a newer one may be others."""
    try:
        version = int((schema.metadata or {})[b"version"])
    except (KeyError, ValueError):
        return  # if it is no index at all, its columns tell
    check_version(version, str(path))


def _taken(table: Any, places: npt.NDArray[np.int64]) -> Any:
    """Rows by their numbers; those that lie side by side need no copy."""
    if places.size and places[-1] - places[0] == places.size - 1 and np.all(np.diff(places) == 1):
        return table.slice(int(places[0]), places.size)
    return table.take(pa.array(places))


def _in_order(table: Any) -> Any:
    """By `seq`. The writer's callers mostly append in that order, and then nothing is copied."""
    seq = table.column("seq").to_numpy()
    if np.all(seq[1:] >= seq[:-1]):
        return table
    return table.take(pa.array(np.argsort(seq, kind="stable")))


_NO_SKETCH = np.empty(0, np.float32)
