"""The index as it grows: rows are collected, then written as one Arrow batch, in one write."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, Protocol, cast

import numpy as np

from tensortap.core.records import Record
from tensortap.core.sketches import FULL
from tensortap.store.format import encode, encode_columns, index_schema, without_locations
from tensortap.store.placements import PlacementTable
from tensortap.store.writer.state import WriterState

__all__ = ["BatchTarget", "IndexWriter", "Rows"]

BATCH = 256
"""Rows that make a batch worth writing."""
AGE = 1.0
"""Longest time in seconds that a row waits."""
MOST_WAITING = 4096
"""Upper bound on waiting rows of about a kilobyte each; `append` waits beyond it."""
MOST_AHEAD = 32_768
"""The same for rows that are appended together: they take little memory until they are written."""

MOST_GATHERED = 8
"""Steps whose rows are written together: for few rows, a batch takes as long as all of its rows do."""
ENOUGH = 4096
"""Rows that need not wait for those of later steps."""

_RESCUED = 8
"""Rows of a batch on a full disk."""


class Rows(Protocol):
    """Many rows at once, whose values may not be known yet."""

    def __len__(self) -> int: ...

    @property
    def may_wait(self) -> bool:
        """Whether they may be written a step later."""

    @property
    def gathers(self) -> bool:
        """Whether they may wait for those of a few later steps, to be written together with them."""

    def join(self, others: Sequence[Any]) -> None:
        """Become these rows and those of others that gather, which come after them."""

    def arrive(self) -> None:
        """Wait until the rows are in host memory."""

    def columns(self) -> Mapping[str, Any]:
        """Return all columns of the index, by name; wait until they are known."""


class BatchTarget(Protocol):
    """Receives the Arrow batches of an index, in order."""

    @property
    def path(self) -> object:
        """Its name in error messages."""

    @property
    def nbytes(self) -> int:
        """Bytes of all whole batches so far."""

    @property
    def dropped_rows(self) -> int:
        """Rows that were written, and dropped again."""

    def write(self, batch: Any) -> None:
        """Append a batch, whole or not at all."""

    def drop(self, step: int) -> None:
        """Drop the batches of a step, which are all written."""

    def close(self, complete: bool) -> None:
        """Accept no more batches. `complete` is False if some could not be written."""


class IndexWriter:
    """Encodes rows and passes them to `target` in batches, with sketches of `buckets` sums.

    `barrier` returns True once all bytes that were put so far are written, False if they cannot be. `by_step` writes no
    batch with rows of several steps, so that the batches of a step can be dropped. After a failure, `has_bytes` returns
    for files and offsets whether the bytes before the offset are written; None if rows cannot be written either.
    """

    def __init__(
        self,
        target: BatchTarget,
        barrier: Callable[[], bool],
        state: WriterState,
        buckets: int = FULL,
        placements: PlacementTable | None = None,
        by_step: bool = False,
        has_bytes: Callable[[Sequence[str], Sequence[int]], list[bool] | None] = lambda files, ends: None,
    ) -> None:
        self._target = target
        self._has_bytes = has_bytes
        self._placements = placements
        self._buckets = buckets
        self._by_step = by_step
        self._barrier = barrier
        self._state = state
        self._seen = _Seen()
        self._schema = index_schema()  # that of all batches, whatever is registered later
        self._thread: threading.Thread | None = None
        # Shared with the thread, under the state's lock:
        self._due = state.condition()
        self._rows: list[Record | Rows] = []
        self._oldest = 0.0
        self._urgent = 0
        """Number of waiting rows to write now."""
        self._expected: Rows | None = None
        """Rows whose arrival to wait for, without writing them yet."""
        self._stopping = False
        self._drops: deque[tuple[int, int]] = deque()
        """Steps to drop, each with the number of rows that must be written before."""
        self.appended = 0
        self.written = 0
        self.missing = 0
        """Written rows that turned out to be empty."""

    @property
    def nbytes(self) -> int:
        """Bytes of all whole batches so far."""
        return self._target.nbytes

    @property
    def records(self) -> int:
        """Number of rows that readers find."""
        return self.written - self.missing - self._target.dropped_rows

    def drop(self, step: int) -> None:
        """Drop the rows of an earlier step, once all rows so far are written."""
        with self._due:
            self._drops.append((self.appended, step))

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
                self._due.notify_all()

    def append_rows(self, rows: Rows) -> None:
        """Append rows that come together; wait if too many are ahead of the disk.

        They are not urgent: they come right before their step ends, which sends them out. Writing them sooner would
        seal slabs that are still being filled.
        """
        state = self._state
        with state.changed:
            if state.failure is not None or self.appended - self.written >= MOST_AHEAD:
                self.hurry()
                state.stall_for(lambda: self.appended - self.written < MOST_AHEAD)
            self._rows.append(rows)
            self.appended += len(rows)
            if len(self._rows) == 1:
                self._oldest = time.monotonic()
                self._start()
                self._due.notify_all()

    def hurry(self, step_is_over: bool = False) -> None:
        """Request that waiting rows are written now, without waiting for it.

        At the end of a step, rows that came together may stay until the end of the next one, up to AGE. They are still
        in transit from a device and arrive during the next forward, when the interpreter has to keep the device busy
        instead of encoding them. The thread sleeps on while rows gather: training would wait for it to wake up.
        """
        with self._due:
            self._expected = None
            count = len(self._rows)
            if step_is_over and count and not isinstance(newest := self._rows[-1], Record):
                waiting = 0 if self._by_step else self._gathered()
                if newest.may_wait and not waiting:
                    self._expected = newest
                    waiting = 1
                count -= waiting
            self._urgent = max(self._urgent, count)
            if self._urgent or self._expected is not None or not step_is_over:
                self._due.notify_all()

    def _gathered(self) -> int:
        """Return the number of newest entries that may wait for those of later steps."""
        steps = rows = 0
        for entry in reversed(self._rows):
            if isinstance(entry, Record) or not entry.gathers:
                break
            steps += 1
            rows += len(entry)
        return steps if steps < MOST_GATHERED and rows < ENOUGH else 0

    def flush(self) -> None:
        """Wait until all rows so far are written."""
        self.hurry()
        self.wait_for(self.appended)

    def wait_for(self, count: int) -> None:
        """Wait until this number of rows is written."""
        with self._state.changed:
            self._state.wait_for(lambda: self.written >= count)
        self._state.check()

    def stop(self) -> None:
        """Write waiting rows, close the stream, and end the thread."""
        with self._due:
            self._stopping = True
            self._due.notify_all()
        if self._thread is not None:
            self._thread.join()
        try:
            self._drop_written()
            self._target.close(complete=self._state.failure is None)
        except OSError as error:
            self._state.fail(error, self._target.path)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tensortap-index", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        try:
            while rows := self._next():
                batches = self._batches(rows)
                if not self._barrier():
                    self._rescue(batches)
                    return
                for count, batch in batches:
                    try:
                        self._write(count, batch)
                    except OSError as error:  # the tensors may leave room when they fail, too
                        self._state.fail(error, self._target.path)
                        self._rescue(chain([(count, batch)], batches))
                        return
                    self._drop_written()
            if self._state.failure is not None:
                self._rescue(())
        except BaseException as error:  # the caller must see any failure
            self._state.fail(error, self._target.path)

    def _write(self, count: int, batch: Any) -> None:
        self._target.write(batch)
        with self._state.changed:
            self.written += count
            self._state.changed.notify_all()

    def _rescue(self, batches: Iterable[tuple[int, Any]]) -> None:
        """Write the rows that waited when the disk was full. Those without bytes have no location.

        The index runs behind the tensors. Without this, a quick run on a full disk would lose steps that are written.
        """
        with self._due:
            rows, self._rows = self._rows, []
        for _, batch in chain(batches, self._batches(rows)):
            files = [name or "" for name in batch.column("file").to_pylist()]
            spans = zip(batch.column("offset").to_pylist(), batch.column("nbytes").to_pylist(), strict=True)
            written = self._has_bytes(files, [(offset or 0) + (nbytes or 0) for offset, nbytes in spans])
            if written is None:
                return
            batch = without_locations(batch, written)
            for first in range(0, batch.num_rows, _RESCUED):  # some may fit where all do not
                part = batch.slice(first, _RESCUED)
                self._write(part.num_rows, part)

    def _drop_written(self) -> None:
        while self._drops and self._drops[0][0] <= self.written:
            self._target.drop(self._drops.popleft()[1])

    def _batches(self, rows: Sequence[Record | Rows]) -> Iterator[tuple[int, Any]]:
        """Yield Arrow batches and their numbers of rows: single records together, each group of rows alone."""
        for group, some in groupby(rows, self._group):
            if group is not None:
                records: list[Any] = list(some)
                first = self._seen.first(record.tensor for record in records)
                yield len(records), encode(records, first, self._schema, self._buckets, self._placements)
            else:
                for together in self._joined(cast("list[Rows]", list(some))):
                    columns = together.columns()
                    self.missing += len(together) - len(columns["tensor"])
                    first = self._seen.first(columns["tensor"])
                    yield len(together), encode_columns(columns, first, self._schema, self._buckets)

    def _joined(self, rows: Sequence[Rows]) -> Iterator[Rows]:
        """Yield rows, with those of several steps joined. If some do not arrive, those before are yielded first."""
        for gathers, some in groupby(rows, lambda each: each.gathers and not self._by_step):
            if not gathers:
                yield from some
                continue
            arrived: list[Rows] = []
            failure: Exception | None = None
            for each in some:
                try:
                    each.arrive()
                except Exception as error:  # the device has failed since
                    failure = error
                    break
                arrived.append(each)
            if arrived:
                arrived[0].join(arrived[1:])
                yield arrived[0]
            if failure is not None:
                raise failure

    def _group(self, row: Record | Rows) -> int | None:
        """Return a number that is equal for records of one batch; None for rows that came together."""
        if not isinstance(row, Record):
            return None
        return row.key.step if self._by_step else 0

    def _next(self) -> Sequence[Record | Rows]:
        """The next batch, once it is due; none when all is done."""
        while True:
            with self._due:
                expected = None
                while not (self._stopping or self._urgent or self._state.failure is not None):
                    left = self._oldest + AGE - time.monotonic()
                    if self._rows and (len(self._rows) >= BATCH or left <= 0):
                        break
                    expected, self._expected = self._expected, None
                    if expected is not None:
                        break
                    self._due.wait(left if self._rows else None)
                if self._state.failure is not None:
                    return ()
                if expected is None:
                    return self._taken()
            try:
                expected.arrive()
            except Exception:  # the device has failed: rows before it are written, and its own fail again then
                with self._due:
                    self._urgent = len(self._rows)

    def _taken(self) -> Sequence[Record | Rows]:
        count = self._urgent if self._urgent and not self._stopping else len(self._rows)
        rows, self._rows = self._rows[:count], self._rows[count:]
        self._oldest, self._urgent = time.monotonic(), 0
        self._state.changed.notify_all()
        return rows


class _Seen:
    """The numbers of the tensors in the index. Numbers without gaps take no memory."""

    def __init__(self) -> None:
        self._below = 0
        self._others = np.empty(0, np.int64)
        """Numbers after a gap, in order."""

    def first(self, numbers: Iterable[int]) -> Sequence[bool]:
        """Add numbers; return for each whether it is new."""
        given = numbers if isinstance(numbers, np.ndarray) else np.fromiter(numbers, np.int64)
        if not len(self._others) and (quick := self._first_in_order(given)) is not None:
            return quick
        distinct, places = np.unique(given, return_index=True)
        new = (distinct < 0) | (distinct >= self._below)
        if len(self._others):
            new &= ~np.isin(distinct, self._others, assume_unique=True)
        first = np.zeros(len(given), bool)
        first[places[new]] = True
        after = np.union1d(self._others, distinct[new])
        behind = int(np.searchsorted(after, self._below))  # negative ones
        gaps = np.flatnonzero(after[behind:] != self._below + np.arange(len(after) - behind))
        end = behind + (int(gaps[0]) if len(gaps) else len(after) - behind)
        self._below += end - behind
        self._others = np.delete(after, slice(behind, end))
        return cast(Sequence[bool], first)

    def _first_in_order(self, numbers: Any) -> Sequence[bool] | None:
        """Variant of `first` without sorting, for new numbers in order and without gaps; for others, change nothing."""
        highest = np.maximum.accumulate(numbers)
        first = np.empty(len(numbers), bool)
        first[:1] = numbers[:1] >= self._below
        np.greater(numbers[1:], np.maximum(highest[:-1], self._below - 1), out=first[1:])
        count = int(np.count_nonzero(first))
        if not len(numbers) or numbers.min() < 0 or int(highest[-1]) != self._below + count - 1:
            return None
        self._below += count
        return cast(Sequence[bool], first)
