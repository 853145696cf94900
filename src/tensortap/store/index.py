"""The index of one rank: rows as Arrow columns, and records made from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tensortap.core import dtypes
from tensortap.core.placement import Placement
from tensortap.core.records import Key, Record
from tensortap.errors import RunUnreadable
from tensortap.store.compact import coded_batch, compact, is_text, plain
from tensortap.store.format import (
    END_OF_STREAM,
    SCHEMA,
    decode,
    encode,
    unknown_columns,
    with_known_columns,
    without_sketch,
)
from tensortap.store.metadata import check_version
from tensortap.store.placements import PlacementTable, read_placements
from tensortap.store.rotation import DroppedSteps
from tensortap.store.segments import read_grown
from tensortap.store.sketch_batches import ColumnSketches, FileSketches, Sketches, open_columns
from tensortap.store.source import Bytes, HeldBytes

__all__ = ["Index", "check_schema", "read_index"]

_MOST_ELEMENTS = float(1 << 62)
_MOST_AXES = 64
_MOST_COUNTED = 1 << 31
"""Bound of micro steps in a step, and of calls of a module in one: no run reaches it."""
_RELEASED_EVERY = 16
"""Batches of a mapped index whose pages count as memory while it is read."""


class Index:
    """Rows of one rank, in order of `seq`."""

    def __init__(
        self,
        rank: int,
        rows: Any,
        *,
        complete: bool = True,
        lost: int = 0,
        missing: bool = False,
        unknown: Sequence[str] = (),
        sketches: Sketches | None = None,
        placements: Sequence[Placement] = (),
        dropped: DroppedSteps | None = None,
        dropped_segments: int = 0,
    ) -> None:
        """`rows` is a pyarrow.Table of SCHEMA; it may have further columns of registered statistics.

        `sketches` reads the sketches if `rows` does not have them. Strings may be coded. `placements` are those of the
        rank, by their numbers in the column `placement`.
        """
        self.rank = rank
        self.placements = placements
        self._sketches = sketches or ColumnSketches(rows.num_rows, partial(rows.column, "sketch"))
        known = with_known_columns(rows)
        self._order = _order(known)
        self.columns = compact(known if self._order is None else known.take(pa.array(self._order)))
        """All columns but the sketch, as `compact` holds them."""
        self.unknown = unknown
        """Columns of the file that this process does not know: statistics that are registered elsewhere."""
        self.complete = complete
        """Whether the writer closed the stream."""
        self.lost = lost
        """Bytes at the end of the file that are not a whole batch."""
        self.dropped_segments = dropped_segments
        """Segments that are left out, because one before them is missing or cut off."""
        self.missing = missing
        """Whether the file is missing."""
        self.dropped = dropped
        """The recorded steps that a ring has dropped."""

    def forget(self, lost: Sequence[bool]) -> None:
        """Remove the locations of these rows: a ring has dropped their tensors."""
        mask = pa.array(lost, pa.bool_())
        for name in ("file", "offset", "nbytes"):
            at = self.columns.schema.get_field_index(name)
            field = self.columns.schema.field(at)
            kind = pa.string() if is_text(field.type) else field.type
            column = pc.if_else(mask, pa.scalar(None, kind), self.columns.column(name).cast(kind))
            self.columns = self.columns.set_column(at, field.with_type(kind), column)
        self.columns = compact(self.columns)

    @classmethod
    def of(
        cls,
        batches: Sequence[Any],
        rank: int,
        complete: bool = True,
        placements: Sequence[Placement] = (),
        dropped: DroppedSteps | None = None,
    ) -> Index:
        """Return the index of Arrow batches that are in memory already."""
        rows = pa.Table.from_batches(batches, batches[0].schema if batches else SCHEMA)
        return cls(rank, rows, complete=complete, placements=placements, dropped=dropped)

    @classmethod
    def of_records(cls, records: Sequence[Record], rank: int, complete: bool = True) -> Index:
        """Return the index of records. The first of each tensor, whose `tensor` is its `seq`, brings the sketch."""
        placements = PlacementTable()
        first = [record.tensor == record.seq for record in records]
        batches = [encode(records, first, placements=placements)] if records else []
        return cls.of(batches, rank, complete, placements)

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    @property
    def rows(self) -> Any:
        """All columns, with strings as such."""
        at = SCHEMA.get_field_index("sketch")
        sketches = self._sketches.column()
        if self._order is not None:
            sketches = sketches.take(pa.array(self._order))
        return plain(self.columns).add_column(at, SCHEMA.field(at), sketches)

    def records(self, places: npt.NDArray[np.int64]) -> list[Record]:
        """Return the records of these rows."""
        rows = _taken(self.columns, places)
        known = self.sketch_rows[places] >= 0
        sketches = iter(self.sketches_at(places[known]))
        return decode(
            rows, self.rank, [next(sketches) if each else _NO_SKETCH for each in known.tolist()], self.placements
        )

    def sketches_at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the sketches of rows as a matrix. All of these rows must have one."""
        rows = self.sketch_rows[places]
        return self._sketches.at(rows if self._order is None else self._order[rows])

    def release_sketches(self) -> None:
        """Release the sketches that were read and are kept for later."""
        self._sketches.release()

    def sketches(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Return all sketches as rows of a matrix, and for each row which of them is its own; -1 if it has none."""
        rows = self.sketch_rows
        having = np.unique(rows[rows >= 0])
        if not having.size:
            return np.empty((0, 0), np.float32), rows
        return self.sketches_at(having), np.where(rows >= 0, np.searchsorted(having, rows), -1)

    @cached_property
    def sketch_rows(self) -> npt.NDArray[np.int64]:
        """For each row, the row with the sketch of its tensor; -1 if there is none."""
        if not len(self):
            return np.empty(0, np.int64)
        tensors = self.columns.column("tensor").to_numpy()
        if self._order is None:
            having = self._sketches.having(tensors)
        else:
            place = np.empty_like(self._order)
            place[self._order] = np.arange(len(self))
            having = np.sort(place[self._sketches.having(tensors[place])])
        if not having.size:
            return np.full(len(self), -1)
        numbers, first = np.unique(tensors[having], return_index=True)
        spot = np.minimum(np.searchsorted(numbers, tensors), numbers.size - 1)
        return np.where(numbers[spot] == tensors, having[first[spot]], -1)

    @cached_property
    def steps(self) -> npt.NDArray[np.int64]:
        return np.asarray(self.columns.column("step").to_numpy())

    @property
    def training_steps(self) -> npt.NDArray[np.int64]:
        """The steps without rows of an evaluation."""
        training = pc.not_equal(self.columns.column("phase"), "eval")
        return np.asarray(self.columns.column("step").filter(training).to_numpy())

    def keys_of_step(self, step: int) -> dict[Key, int]:
        """Return the rows of a step by key; the first row if several have the same key."""
        places = np.flatnonzero(self.steps == step)
        columns = self.columns.select(list(Key._fields)).take(pa.array(places)).to_pydict()
        keys = zip(*columns.values(), strict=True)
        result: dict[Key, int] = {}
        for key, place in zip(keys, places.tolist(), strict=True):
            result.setdefault(Key(*key), place)
        return result


def read_index(source: Bytes, name: str, rank: int, placements: str = "") -> Index:
    """Read the index of a rank, batch by batch, up to the first that is not whole. It is mapped where possible.

    Sketches are read later: those of a compressed index would have to be unpacked for every reader. `placements` is the
    name of the file of placements. It is read after the index, so a row whose placement it lacks is damaged.
    """
    try:
        data, lost_segments, whole = read_grown(source, name)
    except FileNotFoundError:
        return Index(rank, SCHEMA.empty_table(), complete=False, missing=True)
    size = len(data)
    if not size:
        return Index(rank, SCHEMA.empty_table(), complete=False, dropped_segments=lost_segments)
    path = source.address(name)
    stream = pa.BufferReader(pa.py_buffer(data))
    batches: list[Any] = []
    places: list[tuple[int, int, int]] = []
    unknown: list[str] = []
    dropped: DroppedSteps | None = None
    head, end, complete = 0, 0, False
    try:
        schema = pa.ipc.read_schema(stream)
        unknown = check_schema(schema, path)
        dropped = DroppedSteps.of(schema.metadata)
        head = end = stream.tell()
        stream.seek(0)
        reader = open_columns(stream, [at for at, each in enumerate(schema.names) if each != "sketch"])
        while True:
            batch = reader.read_next_batch()
            batch.validate(full=True)  # Arrow follows the offsets of a damaged file out of its memory
            batches.append(coded_batch(batch))
            places.append((end, stream.tell(), batch.num_rows))
            end = stream.tell()
            if not len(places) % _RELEASED_EVERY:
                source.release_pages()
    except StopIteration:
        stream.seek(end)
        complete = stream.read(len(END_OF_STREAM)) == END_OF_STREAM
        end += len(END_OF_STREAM) if complete else 0
    except (OSError, pa.ArrowException):
        pass  # the rest is not a whole batch
    source.release_pages()
    rows = pa.Table.from_batches(batches, batches[0].schema if batches else without_sketch())
    if problem := _find_problem(rows):
        raise RunUnreadable(f"{path} is damaged: {problem}.")
    found = Index(
        rank,
        rows,
        complete=complete,
        lost=size - end,
        unknown=unknown,
        sketches=FileSketches(source if whole else HeldBytes(data), name, head, places),
        placements=_read_placements(source, placements, rows) if placements else (),
        dropped=dropped,
        dropped_segments=lost_segments,
    )
    del batches, rows
    pa.default_memory_pool().release_unused()  # unpacking and coding took more than the columns keep
    return found


def _read_placements(source: Bytes, name: str, rows: Any) -> list[Placement]:
    """Return the placements. Without them the digests of their rows mean nothing, so a damaged file is an error."""
    try:
        found = read_placements(source, name)
    except ValueError as error:
        raise RunUnreadable(f"{source.address(name)} is damaged: {error}.") from error
    if "placement" in rows.column_names:
        bounds = pc.min_max(rows.column("placement")).as_py()
        if bounds["max"] is not None and not 0 <= bounds["min"] <= bounds["max"] < len(found):
            raise RunUnreadable(
                f"{source.address(name)} is damaged: it has {len(found)} placements, and the index names number "
                f"{bounds['min'] if bounds['min'] < 0 else bounds['max']}."
            )
    return found


def check_schema(schema: Any, path: str) -> list[str]:
    """Return the unknown columns. Check the version before the columns: a newer format may have other ones."""
    try:
        version = int((schema.metadata or {})[b"version"])
    except (KeyError, ValueError):
        version = None  # a file that is not an index has other columns
    if version is not None:
        check_version(version, path)
    unknown = unknown_columns(schema)
    if unknown is None:
        raise RunUnreadable(f"{path} is damaged: its columns are not those of an index.")
    return unknown


def _find_problem(rows: Any) -> str:
    """Name the invalid values of the rows; an empty text if there are none."""
    for field in rows.schema:
        if field.name in SCHEMA.names and not SCHEMA.field(field.name).nullable and rows.column(field.name).null_count:
            return f"{field.name} is missing in some rows"
    unknown = [name for name in pc.unique(rows.column("dtype")).to_pylist() if name not in dtypes.NAMES]
    if unknown:
        return f"it names the dtype {unknown[0][:40]!r}, which does not exist"
    for name in ("micro", "call"):
        bounds = pc.min_max(rows.column(name)).as_py()
        if len(rows) and not 0 <= bounds["min"] <= bounds["max"] < _MOST_COUNTED:
            return f"{name} is a count, but reaches from {bounds['min']} to {bounds['max']}"
    for chunk in rows.column("shape").chunks:
        sizes = chunk.flatten().to_numpy(zero_copy_only=False)
        lengths = chunk.value_lengths().to_numpy(zero_copy_only=False)
        if sizes.size and (not np.issubdtype(sizes.dtype, np.integer) or sizes.min() < 0):
            return "a shape has a size that is not a number of elements"
        if lengths.max(initial=0) > _MOST_AXES:
            return f"a shape has {lengths.max()} axes"
        starts = (np.cumsum(lengths) - lengths)[lengths > 0]
        if starts.size and np.multiply.reduceat(sizes.astype(np.float64), starts).max() > _MOST_ELEMENTS:
            return "a shape has more elements than any tensor"
    return ""


def _taken(table: Any, places: npt.NDArray[np.int64]) -> Any:
    """Return rows by number. Consecutive rows need no copy."""
    if places.size and places[-1] - places[0] == places.size - 1 and np.all(np.diff(places) == 1):
        return table.slice(int(places[0]), places.size)
    return table.take(pa.array(places))


def _order(table: Any) -> npt.NDArray[np.int64] | None:
    """Return the order of rows by `seq`. They usually are in that order; None then, and nothing is copied."""
    seq = table.column("seq").to_numpy()
    return None if np.all(seq[1:] >= seq[:-1]) else np.argsort(seq, kind="stable")


_NO_SKETCH = np.empty(0, np.float32)
