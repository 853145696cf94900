"""Measures many pairs of tensors from their files, in this process or in several.

A task is plain data: two spans of files, and a range of elements. `batches` cuts and groups tasks into batches that are
worth dispatching. `work` measures one batch in any process that sees the same files. `Gather` joins the parts. An
engine runs `work` on every batch: `Serial` in this process, those of `engines` in others. The numbers are the same bit
for bit for every engine and any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tensortap.compare.join.bands import Assembly, ranges, read_range
from tensortap.core import dtypes
from tensortap.errors import UsageError
from tensortap.kernels.pairs.reference import CHUNK, PairMeasure, TensorRows
from tensortap.store.source import AddressedFiles, Bytes, Range

__all__ = [
    "Batch",
    "Engine",
    "Gather",
    "Parts",
    "Progress",
    "Results",
    "Serial",
    "Span",
    "Task",
    "TaskReader",
    "batches",
    "work",
]

BATCH = 64 << 20
"""Bytes of both sides in one batch, which are requested together: a few milliseconds of work."""
_BLOCK = 32 << 20  # bytes of both sides that are measured at a time

Progress = Callable[[int], None]
Results = Iterator[tuple[int, PairMeasure]]
Part = npt.NDArray[np.float64]
Parts = list[tuple[int, Part]]


@dataclass(frozen=True, slots=True)
class Span:
    """The range of an object that holds a tensor, and its dtype and shape."""

    name: str
    """The object that holds them, as `Bytes` names it."""
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    whole: Assembly | None = None
    """The pieces of the tensor, if several ranks stored it; then the range above stands for none."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the constructor, in a quarter of the time that a dataclass takes by itself: batches have many."""
        return Span, _span_fields(self)


_span_fields = attrgetter(*Span.__slots__)


@dataclass(frozen=True, slots=True)
class Task:
    """Two tensors of one shape, or the elements `start` to `stop` of them in C order."""

    reference: Span
    candidate: Span
    start: int = 0
    stop: int | None = None
    """None means the end of the tensors."""
    rtol: float | None = None
    atol: float | None = None
    size: float = 0.0
    """The reference's l2, from which the floor for rows of nearly zero follows; 0 if unknown."""

    @property
    def rows(self) -> TensorRows:
        components = 2 if dtypes.numpy_dtype(self.reference.dtype).kind == "c" else 1
        return TensorRows.of(self.reference.shape, components, self.size)

    @property
    def elements(self) -> int:
        whole = self.reference.nbytes // dtypes.numpy_dtype(self.reference.dtype).itemsize
        return (whole if self.stop is None else self.stop) - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of both sides."""
        itemsize = dtypes.numpy_dtype(self.reference.dtype).itemsize + dtypes.numpy_dtype(self.candidate.dtype).itemsize
        return self.elements * itemsize

    def __reduce__(self) -> tuple[Any, ...]:
        return Task, _task_fields(self)  # see Span


_task_fields = attrgetter(*Task.__slots__)
Batch = list[tuple[int, Task]]


class Engine(Protocol):
    """Runs tasks. Results come as they are ready, in any order; closing the iterator cancels the rest."""

    def run(self, tasks: Iterable[Task], progress: Progress | None = None) -> Results:
        """Yield (number, measure) of each task. `progress` is called with the bytes of both sides done so far."""
        ...


class Serial:
    """Measures in this process, with the kernel's own threads; None means one for each core."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def run(self, tasks: Iterable[Task], progress: Progress | None = None) -> Results:
        gather = Gather(progress)
        with TaskReader() as reader:
            for batch in batches(gather.expect(tasks)):
                yield from gather.add(batch, work(batch, reader, self._threads))


def batches(tasks: Iterable[tuple[int, Task]], nbytes: int = BATCH) -> Iterator[Batch]:
    """Yield the tasks in order, cut and grouped into batches of about `nbytes` of both sides together."""
    batch: Batch = []
    size = 0
    for number, task in tasks:
        for piece in _cut(task, nbytes):
            if batch and size + piece.nbytes > nbytes:
                yield batch
                batch, size = [], 0
            batch.append((number, piece))
            size += piece.nbytes + 4096  # an empty tensor is work, too
    if batch:
        yield batch


def work(batch: Batch, reader: TaskReader, threads: int | None = None) -> Parts:
    """Measure a batch. Partial results, which `Gather` joins, are small: a few hundred bytes a megabyte."""
    found: list[list[Part]] = [[] for _ in batch]
    for together in batches(enumerate(task for _, task in batch)):  # the caller's batch may be larger
        reader.prefetch([task for _, task in together])
        for place, task in together:
            found[place] += [reader.measure(block, threads) for block in _cut(task, _BLOCK)]
        reader.release_pages()
    return [
        (number, parts[0] if len(parts) == 1 else np.concatenate(parts))
        for (number, _), parts in zip(batch, found, strict=True)
    ]


class Gather:
    """Joins the parts of each task as they arrive, and yields each complete task."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._done = 0
        self._tasks: dict[int, Task] = {}
        self._missing: dict[int, int] = {}
        self._parts: dict[int, list[npt.NDArray[np.float64]]] = {}

    def expect(self, tasks: Iterable[Task]) -> Iterator[tuple[int, Task]]:
        """Register the tasks; yield each with its number."""
        for number, task in enumerate(tasks):
            _check(task)
            self._tasks[number], self._missing[number], self._parts[number] = task, task.elements, []
            yield number, task

    def add(self, batch: Batch, parts: Parts) -> Results:
        from tensortap.kernels.pairs.cpu import join

        for (number, piece), (_, part) in zip(batch, parts, strict=True):
            self._missing[number] -= piece.elements
            self._parts[number].append(part)
            self._done += piece.nbytes
            if not self._missing[number]:
                task = self._tasks.pop(number)
                del self._missing[number]
                yield number, join(self._parts.pop(number), _index_shape(task), task.rows)
        if self._progress is not None:
            self._progress(self._done)


class TaskReader:
    """Reads blocks of tasks and measures them.

    Blocks are views where the medium can be mapped: a copy would take longer than the measuring. The size of a file is
    checked before each block, because a file that was cut off since it was mapped would kill the process.
    """

    def __init__(self, files: Bytes | None = None) -> None:
        self._files = files or AddressedFiles()

    def __enter__(self) -> TaskReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def measure(self, block: Task, threads: int | None) -> Part:
        """Measure one block."""
        from tensortap.kernels.pairs.cpu import measure_range  # loads the compiler: not before there are two tensors

        r, c = self._read(block.reference, block), self._read(block.candidate, block)
        return measure_range(r, c, block.start, rtol=block.rtol, atol=block.atol, rows=block.rows, threads=threads)

    def prefetch(self, tasks: Sequence[Task]) -> None:
        """Request the bytes of all tasks together where each request takes time."""
        self._files.prefetch(
            each for task in tasks for span in (task.reference, task.candidate) for each in _ranges(span, task)
        )

    def release_pages(self) -> None:
        """Stop counting the pages of mapped files as this process's memory; the system's cache keeps them."""
        self._files.release_pages()

    def _read(self, span: Span, task: Task) -> npt.NDArray[Any]:
        """Return the task's elements of one side, read-only."""
        dtype = dtypes.numpy_dtype(span.dtype)
        wanted = _range(span, task)
        if not wanted.nbytes:
            return np.empty(0, dtype)
        if span.whole is not None:
            return read_range(self._files, span.whole, span.dtype, task.start, task.start + task.elements)
        return np.frombuffer(self._files.view(*wanted), np.uint8).view(dtype)


def _ranges(span: Span, task: Task) -> Iterator[Range]:
    """Yield all ranges that are read for the task's elements of one side."""
    if span.whole is not None:
        yield from ranges(span.whole, span.dtype, task.start, task.start + task.elements)
    else:
        yield _range(span, task)


def _range(span: Span, task: Task) -> Range:
    """Return where the task's elements of one side are."""
    itemsize = dtypes.numpy_dtype(span.dtype).itemsize
    return Range(span.name, span.offset + task.start * itemsize, task.elements * itemsize)


def _check(task: Task) -> None:
    r, c = task.reference, task.candidate
    if r.shape != c.shape:
        raise UsageError(f"{r.name} and {c.name}: shapes {r.shape} and {c.shape} cannot be compared")
    for span in (r, c):
        expected = int(np.prod(span.shape, dtype=np.int64)) * dtypes.numpy_dtype(span.dtype).itemsize
        if span.offset < 0 or span.nbytes != expected:
            raise UsageError(f"{span.name}: {span.dtype} {span.shape} is not {span.nbytes} bytes at {span.offset}")
    if task.start < 0 or task.elements < 0:
        raise UsageError(f"{r.name}: elements {task.start} to {task.stop} of {r.shape} cannot be compared")


def _cut(task: Task, nbytes: int) -> Iterator[Task]:
    """Yield the task in pieces, cut between chunks of the kernel, so that the joined result is the same bit for bit."""
    if task.nbytes <= nbytes:
        yield task
        return
    stop = task.start + task.elements
    chunk_bytes = CHUNK * (task.nbytes // task.elements)
    step = max(nbytes // chunk_bytes, 1) * CHUNK
    for start in range(task.start, stop, step):
        yield replace(task, start=start, stop=min(start + step, stop))


def _index_shape(task: Task) -> tuple[int, ...]:
    shape = task.reference.shape
    return (*shape, 2) if dtypes.numpy_dtype(task.reference.dtype).kind == "c" else shape
