"""Measures pairs on a device, such as a GPU: threads read files ahead while earlier pieces are copied and measured.

Three slots rotate: one is being filled, one is being copied and measured, one may be done. Meanwhile the CPU's kernel
measures tensors that are too small to be worth the transfer; the records of both are joined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress

from tensortap.compare.measure.engine import Gather, Progress, Results, Span, Task, TaskReader, batches, work
from tensortap.core import dtypes
from tensortap.core.machine import cores
from tensortap.kernels.pairs.device import ALIGNED, PairDevice, PairPiece, PairSlot
from tensortap.kernels.pairs.reference import CHUNK
from tensortap.store.source import AddressedFiles

__all__ = ["OnDevice"]

PIECE = 32 << 20
"""Bytes of both sides that a slot takes."""
LEAST = 1 << 20
"""Bytes of both sides below which the CPU finishes before a device would start."""
_SLOTS = 3
_LARGEST_CHUNK = CHUNK * 2 * 16  # bytes; tasks are cut between chunks only, and an element has 16 bytes at most
_STRIPE = 4 << 20  # bytes that one thread reads at a time
_MOST_READERS = 8


class OnDevice:
    """The engine that measures large tasks on a device and small ones on the CPU."""

    def __init__(self, device: PairDevice, piece: int = PIECE, least: int = LEAST) -> None:
        self._device = device
        self._piece = piece
        self._least = least

    def run(self, tasks: Iterable[Task], progress: Progress | None = None) -> Results:
        gather = Gather(progress)
        with TaskReader() as small_reader, _Reader() as reader:
            line = _Line(self._device, max(self._piece, _LARGEST_CHUNK) + ALIGNED, reader, gather)
            for batch in batches(gather.expect(tasks), self._piece):
                worth = [self._is_worth_it(task) for _, task in batch]
                for number, task in compress(batch, worth):
                    yield from line.put(number, task)
                small = [each for each, large in zip(batch, worth, strict=True) if not large]
                yield from gather.add(small, work(small, small_reader))
            yield from line.finish()

    def _is_worth_it(self, task: Task) -> bool:
        """Whether a device measures a task faster. Tensors in pieces are gathered by the CPU, which measures them."""
        in_pieces = task.reference.whole is not None or task.candidate.whole is not None
        return task.elements > 0 and task.nbytes >= self._least and not in_pieces


@dataclass(slots=True)
class _Running:
    number: int
    task: Task
    slot: PairSlot
    reading: list[Future[None]]
    started: bool = False


class _Line:
    """Pieces in flight: the newest is being read, earlier ones are on the device."""

    def __init__(self, device: PairDevice, nbytes: int, reader: _Reader, gather: Gather) -> None:
        self._device = device
        self._nbytes = nbytes
        self._reader = reader
        self._gather = gather
        self._slots = 0
        self._free: list[PairSlot] = []
        self._running: deque[_Running] = deque()

    def put(self, number: int, task: Task) -> Results:
        """Begin to read a piece; yield the measures that are complete by then."""
        if not self._free and self._slots == _SLOTS:
            yield from self._take()
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._device.slot(self._nbytes)
            self._slots += 1
        piece = _piece(task)
        reading: list[Future[None]] = []
        for span, place in zip((task.reference, task.candidate), piece.spans, strict=True):
            reading += self._reader.read(span, task, slot.memory[place])
        self._running.append(_Running(number, task, slot, reading))
        for before in list(self._running)[:-1]:
            self._start(before)

    def finish(self) -> Results:
        while self._running:
            yield from self._take()

    def _start(self, running: _Running) -> None:
        if not running.started:
            for part in running.reading:
                part.result()
            running.slot.start(_piece(running.task))
            running.started = True

    def _take(self) -> Results:
        first = self._running.popleft()
        self._start(first)
        record = first.slot.record()
        self._free.append(first.slot)
        yield from self._gather.add([(first.number, first.task)], [(first.number, record)])


class _Reader:
    """Threads that read spans of files."""

    def __init__(self) -> None:
        self._files = AddressedFiles()
        self._threads = ThreadPoolExecutor(min(cores(), _MOST_READERS), thread_name_prefix="tensortap-read")

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._files.close()

    def read(self, span: Span, task: Task, into: memoryview) -> list[Future[None]]:
        """Begin to read the task's elements of one side, in stripes."""
        begin = span.offset + task.start * dtypes.numpy_dtype(span.dtype).itemsize
        stripes = range(0, len(into), _STRIPE)
        read = self._files.read_into
        return [self._threads.submit(read, span.name, begin + at, into[at : at + _STRIPE]) for at in stripes]


def _piece(task: Task) -> PairPiece:
    return PairPiece(
        task.reference.dtype, task.candidate.dtype, task.start, task.elements, task.rows, task.rtol, task.atol
    )
