"""The contract of a pool of workers, and the engine over any of them.

Few batches are in flight at a time, so the memory of this process does not depend on how much there is to measure. They
are large at first, because a cluster takes about a millisecond to dispatch one, and small in the end, so that all
workers finish together. A batch whose worker died is submitted again. A batch that cannot be measured, because a file
is damaged, is an error at once: no other worker could read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from tensortap import errors
from tensortap.compare.measure.engine import Batch, Gather, Parts, Progress, Results, Task, TaskReader, batches, work
from tensortap.errors import TensortapError

__all__ = ["Outcome", "PoolEngine", "WorkerDied", "WorkerPool", "measure_batch"]

Outcome = tuple[str, Any]
"""The result of a worker: ("parts", (lengths, all parts as one array)), or the name of an error and its message."""
_PARTS = "parts"
_MOST_DEATHS = 3
"""Workers that may die over one batch before it is given up."""
_QUEUED = 2
"""Batches in flight for each worker: one running, and one waiting so that the worker need not."""
_MOST_JOINED = 8
"""Batches dispatched as one: 512 MB. Their parts take 80 KB, which Ray returns without its object store."""
_MOST_TASKS = 1024
"""Tasks of a batch above which it takes long enough to be dispatched alone."""


class WorkerDied(Exception):
    """The worker of a batch died, or was lost: another one may measure it."""


class WorkerPool(ABC):
    """Runs `measure_batch` on batches, somewhere. Not used by several threads at a time."""

    workers: int
    """Batches that run at the same time."""

    @abstractmethod
    def submit(self, batch: Batch) -> Hashable:
        """Start a batch. Return what identifies it."""

    @abstractmethod
    def wait(self, running: Collection[Hashable]) -> Collection[Hashable]:
        """Wait until at least one of these is over. Return those that are."""

    @abstractmethod
    def outcome(self, finished: Hashable) -> Outcome:
        """Return the outcome of a batch. Raise WorkerDied if its worker died."""

    @abstractmethod
    def cancel(self, running: Collection[Hashable]) -> None:
        """Stop these, or let them end unheard."""

    @abstractmethod
    def close(self) -> None:
        """Release what the pool has started."""


class PoolEngine:
    """Measures on a pool of workers, which is opened when there is work. Close it, or use it as a context.

    Outside of a context, the pool is closed after each `run`.
    """

    def __init__(self, open_pool: Callable[[], WorkerPool]) -> None:
        self._open_pool = open_pool
        self._pool: WorkerPool | None = None
        self._stays_open = False

    def __enter__(self) -> PoolEngine:
        self._stays_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._stays_open = False
        self.close()

    def close(self) -> None:
        """Release the workers."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def run(self, tasks: Iterable[Task], progress: Progress | None = None) -> Results:
        if self._pool is None:
            self._pool = self._open_pool()
        pool, gather = self._pool, Gather(progress)
        running: dict[Hashable, Batch] = {}
        deaths: Counter[int] = Counter()
        try:
            for batch in _joined(batches(gather.expect(tasks)), _nbytes(tasks), pool.workers):
                running[pool.submit(batch)] = batch
                while len(running) >= _QUEUED * pool.workers:
                    yield from _finished(pool, running, gather, deaths)
            while running:
                yield from _finished(pool, running, gather, deaths)
        finally:
            if running:
                pool.cancel(list(running))
            if not self._stays_open:
                self.close()


def _joined(found: Iterable[Batch], nbytes: int, workers: int) -> Iterator[Batch]:
    """Join batches of together `nbytes` into larger ones, each at most a worker's share of what is left."""
    batch: Batch = []
    count, size = 0, 0
    for each in found:
        more = sum(task.nbytes for _, task in each)
        full = count == _MOST_JOINED or len(batch) + len(each) > _MOST_TASKS
        if batch and (full or (size + more) * workers > nbytes):
            yield batch
            batch, count, nbytes, size = [], 0, nbytes - size, 0
        batch, count, size = batch + each, count + 1, size + more
    if batch:
        yield batch


def _nbytes(tasks: Iterable[Task]) -> int:
    """Return the bytes of all tasks; 0 if only iterating over them would show."""
    return sum(task.nbytes for task in tasks) if isinstance(tasks, Sequence) else 0


def _finished(pool: WorkerPool, running: dict[Hashable, Batch], gather: Gather, deaths: Counter[int]) -> Results:
    done = pool.wait(list(running))
    for each in sorted(done, key=lambda one: running[one][0][0]):
        batch = running.pop(each)
        try:
            outcome = pool.outcome(each)
        except WorkerDied as error:
            deaths[id(batch)] += 1
            if deaths[id(batch)] >= _MOST_DEATHS:
                raise _given_up(batch, error) from error
            running[pool.submit(batch)] = batch
            continue
        deaths.pop(id(batch), None)
        yield from gather.add(batch, _parts_of(batch, outcome))


def measure_batch(batch: Batch) -> Outcome:
    """Measure a batch in a worker. Errors of tensortap come back as plain data, since a cluster wraps exceptions.

    Parts come back as one array, because clusters take several microseconds for each array that they return.
    """
    try:
        parts = [part for _, part in work(batch, _reader, threads=1)]
    except TensortapError as error:
        return type(error).__name__, str(error)
    return _PARTS, (list(map(len, parts)), np.concatenate(parts) if parts else None)


def _parts_of(batch: Batch, outcome: Outcome) -> Parts:
    kind, found = outcome
    if kind != _PARTS:
        raised: TensortapError = getattr(errors, kind)(found)
        raise raised
    lengths, joined = found
    ends = list(accumulate(lengths))
    return [(number, joined[end - length : end]) for (number, _), length, end in zip(batch, lengths, ends, strict=True)]


def _given_up(batch: Batch, error: WorkerDied) -> TensortapError:
    first = batch[0][1].reference
    return TensortapError(
        f"{_MOST_DEATHS} workers died over the batch that begins with {first.dtype} {first.shape} of {first.name}: "
        f"{error}. Give the workers more memory, or measure with engine='serial'."
    )


_reader = TaskReader()
