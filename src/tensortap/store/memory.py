"""Runs held in memory: MemoryWriter takes what capture records, MemoryRun reads it back. No file is involved.

Both keep the contracts of their counterparts on disk. Records go through the same IndexWriter and become the same Arrow
batches, so filters, comparisons and reports work on them unchanged. Memory is bounded by `max_memory`:

- A tensor counts with its bytes, a record with RECORD_BYTES, plain arguments with about the size of their JSON text.
- Tensors may use TENSOR_SHARE of the bound. From the first tensor that does not fit, records keep their summary alone.
- When records reach the whole bound, recording stops, as it does on a full disk. Earlier records stay readable.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import compress, count
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.host_copies import DeviceBytes
from tensortap.core.machine import memory, neighbours
from tensortap.core.placement import Mesh
from tensortap.core.records import Coverage, Location, Record
from tensortap.core.sketches import FULL
from tensortap.errors import StoreWriteError, UsageError
from tensortap.store.calls import CallEntry, Calls
from tensortap.store.index import Index
from tensortap.store.loop import LoopFact, LoopFacts
from tensortap.store.metadata import CoverageFile, RankStatus
from tensortap.store.rotation import DroppedSteps, RemainingSteps, holding
from tensortap.store.run import Run, RunSource
from tensortap.store.source import kept_location
from tensortap.store.writer.index import IndexWriter, Rows
from tensortap.store.writer.rank_writer import RankWriter, storable_dtype
from tensortap.store.writer.state import write_error

__all__ = ["MemoryRun", "MemoryWriter", "default_bound"]

ByteArray = npt.NDArray[np.uint8]

DEFAULT_BOUND = 2 << 30
TENSOR_SHARE = 7 / 8
RECORD_BYTES = 1536
"""A row with its sketch takes about 1.3 KiB."""
_CALL_BYTES = 512
_FILE = "memory"
"""The file name of tensors in memory. The offset is the number of the tensor."""
_numbers = count(1)


def default_bound() -> int:
    """Return DEFAULT_BOUND, or a quarter of this process's share of the machine's memory if that is less."""
    available = memory() // 4 // neighbours()
    return min(DEFAULT_BOUND, available) if available else DEFAULT_BOUND


@dataclass
class _Batches:
    """The index's batches, in a list."""

    path: Path
    was_dropped: Callable[[int], None]
    """Called after a step was dropped, with its number of rows."""
    found: list[Any] = field(default_factory=list)
    nbytes: int = 0
    dropped_rows: int = 0
    dropped: DroppedSteps | None = None
    complete: bool = False

    def write(self, batch: Any) -> None:
        self.found.append(batch)
        self.nbytes += batch.nbytes

    def drop(self, step: int) -> None:
        gone = [each for each in self.found if _step_of(each) == step]
        self.found = [each for each in self.found if _step_of(each) != step]
        self.nbytes -= sum(each.nbytes for each in gone)
        rows = sum(each.num_rows for each in gone)
        self.dropped_rows += rows
        count, last = self.dropped or (0, -1)
        self.dropped = DroppedSteps(count + 1, max(last, step))
        self.was_dropped(rows)

    @property
    def remaining(self) -> RemainingSteps:
        """The steps that were not dropped."""
        return RemainingSteps({_step_of(each) for each in self.found}, self.dropped.last if self.dropped else -1)

    def close(self, complete: bool) -> None:
        self.complete = complete


class MemoryWriter(RankWriter):
    """Holds one rank of a run in this process's memory; see the module's description for the bound.

    >>> with MemoryWriter(info={"framework": "torch"}) as writer:              # doctest: +SKIP
    ...     where = writer.put("fc1 output 0", array, step=0)
    ...     writer.append(Record(..., location=where))
    >>> run = writer.run()                                                     # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        info: Mapping[str, Any],
        rank: int = 0,
        world: int = 1,
        max_memory: int | None = None,
        buckets: int = FULL,
        rotates: bool = False,
    ) -> None:
        if max_memory is not None and (not isinstance(max_memory, int) or max_memory < 1):
            raise UsageError(f"max_memory: {max_memory!r} is not a number of bytes, 1 or more")
        if sum(writer._used for writer in _writers) > _WORTH_COLLECTING:
            gc.collect()  # an earlier tap without references is part of a cycle, and so is everything it holds
        model = f" ({info['model']})" if "model" in info else ""
        super().__init__(Path(f"in-memory run {next(_numbers)}{model}"), rank, world, info)
        self._bound = default_bound() if max_memory is None else max_memory
        self._lock = threading.Lock()
        self._used: int = 0
        self._tensors_fit = True
        self._notices: list[str] = []
        self._tensors: dict[int, ByteArray] = {}
        self._next = count()
        self._rings: dict[int, list[int]] = {}
        """Tensors of a ring, by step."""
        self._ring_fits = True
        self._uses_ring = False
        self._coming: list[Callable[[], None]] = []
        """One call for each part of a tensor that a device is still sending; it waits until the part has arrived."""
        self._pending = threading.Lock()
        self._calls = Calls()
        self._loop = LoopFacts()
        self._coverage = CoverageFile()
        self._status = RankStatus("running")
        self._batches = _Batches(self.path, self._drop_lines)
        _writers.add(self)
        self._lines: dict[Hashable, list[tuple[int, int]]] = {}
        """Steps and sizes of the plain arguments of each module, and of each loop fact."""
        self._index = IndexWriter(self._batches, self._barrier, self._state, buckets, self._placements, by_step=rotates)

    def put(self, name: str, array: npt.NDArray[Any], *, step: int, ring: bool = False) -> Location | None:
        self._check_open()
        array = np.asarray(array)
        storable_dtype(name, array)
        if not self._has_room(name, step, array.nbytes, ring):
            return None
        little = np.array(array, dtype=array.dtype.newbyteorder("<"), order="C")  # always a copy
        return self._add(little.reshape(-1).view(np.uint8), step if ring else None)

    def put_incoming(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        parts: Iterable[DeviceBytes],
        *,
        step: int,
        ring: bool = False,
    ) -> Location | None:
        self._check_open()
        nbytes = prod(shape) * dtypes.numpy_dtype(dtype).itemsize
        if not self._has_room(name, step, nbytes, ring):
            return None
        target = np.empty(nbytes, np.uint8)
        # First, because a device may write into it even if a later part fails.
        location = self._add(target, step if ring else None)
        at = 0
        for part in parts:
            arrived = part.copy(target[at : at + part.size], 0)
            at += part.size
            with self._lock:
                self._coming.append(arrived)
        return location

    def release(self, step: int) -> None:
        self._check_open()
        if step not in self._rings:
            return
        self._barrier()  # a device may still write into them
        with self._lock:
            for number in self._rings.pop(step):
                self._used -= self._tensors.pop(number).nbytes

    def _drop_lines(self, rows: int) -> None:
        """Drop the plain arguments and loop facts of dropped steps, which had this number of rows."""
        remaining, freed = self._batches.remaining, RECORD_BYTES * rows
        with self._lock:
            self._calls.drop_all_but(remaining)
            self._loop.drop_all_but(remaining)
            for subject, lines in self._lines.items():
                several = isinstance(subject, str)
                kept = list(compress(lines, holding([step for step, _ in lines], remaining, several)))
                freed += sum(size for _, size in lines) - sum(size for _, size in kept)
                self._lines[subject] = kept
            self._used -= freed

    def append(self, record: Record) -> None:
        self._charge(RECORD_BYTES)
        super().append(record)

    def append_rows(self, rows: Rows) -> None:
        with self._lock:
            room = max(0, (self._bound - self._used) // RECORD_BYTES)
        if 0 < room < len(rows):
            self._charge(RECORD_BYTES * room)
            super().append_rows(_FirstRows(rows, room))  # the others are refused, as single records are
        self._charge(RECORD_BYTES * len(rows))
        super().append_rows(rows)

    def called(self, step: int, micro: int, module: str, call: int, arguments: Mapping[str, Any]) -> None:
        self._check_open()
        self._charge_line(step, module, arguments)
        with self._lock:
            self._calls.add(CallEntry(step, micro, module, call, arguments))

    def loop_fact(self, step: int, fact: str, of: str, value: Mapping[str, Any]) -> None:
        self._check_open()
        self._charge_line(step, (fact, of), value)
        with self._lock:
            self._loop.add(LoopFact(step, fact, of, value))

    def arrange(self, mesh: Mesh | None, renames: Mapping[str, str]) -> None:
        super().arrange(mesh, renames)
        self._status = replace(self._status, mesh=mesh, renames=dict(renames))

    def end_step(self, step: int) -> None:
        self._check_open()
        self._state.check()
        self._index.hurry(step_is_over=True)

    def coverage(self, rows: Sequence[Coverage], notices: Sequence[str] = ()) -> None:
        self._check_open()
        self._coverage = CoverageFile(list(rows), list(notices))

    def take_notices(self) -> list[str]:
        with self._lock:
            notices, self._notices = self._notices, []
        return notices

    def stats(self) -> dict[str, Any]:
        return {
            "bytes": sum(tensor.nbytes for tensor in list(self._tensors.values())) + self._batches.nbytes,
            "records": self._index.records,
            "files": 0,
            "stalled_seconds": self._state.stalled,
            "queued": 0,
            "peak_buffer_bytes": self._used,
        }

    def close(self, status: str = "finished", reason: str = "") -> None:
        with self._closing:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._index.stop()
        failure = self._state.failure
        if failure:
            status, reason = "failed", str(write_error(*failure))
        self._status = replace(self._status, status=status, reason=reason)
        if not self._state.reported:
            self._state.check()

    def run(self) -> MemoryRun:
        """Return a run of all that is stored so far: call `flush` first, or `close`."""
        found, complete = list(self._batches.found), self._batches.complete
        index = Index.of(found, self.rank, complete, self._placements, self._batches.dropped)
        with self._lock:
            tensors = dict(self._tensors)
            calls, loop = copy(self._calls), copy(self._loop)  # a ring drops entries of its own
        if self._uses_ring:
            index.forget([at is not None and at not in tensors for at in index.columns.column("offset").to_pylist()])
        beside = _Beside(calls, loop, self._status, self._coverage)
        return MemoryRun(_MemorySource(self.path, self._info, index, tensors, beside, self._batches.nbytes))

    def _barrier(self) -> bool:
        with self._pending:
            with self._lock:
                coming, self._coming = self._coming, []
            for wait in coming:
                wait()
        return True

    def _add(self, tensor: ByteArray, ring_step: int | None) -> Location:
        with self._lock:
            number = next(self._next)
            self._tensors[number] = tensor
            if ring_step is not None:
                self._uses_ring = True
                self._rings.setdefault(ring_step, []).append(number)
            return Location(_FILE, number, tensor.nbytes)

    def _has_room(self, name: str, step: int, nbytes: int, ring: bool) -> bool:
        """Reserve room for a tensor. After one that does not fit, none does, so that a notice can name one step. A ring
        gets room again when it moves on."""
        with self._lock:
            if ring:
                return self._has_room_in_ring(name, step, nbytes)
            if self._tensors_fit and self._used + nbytes > self._bound * TENSOR_SHARE:
                self._tensors_fit = False
                self._notices.append(
                    f"{self._limit()} has no room for more tensors: from step {step}, {name} on, only summaries are "
                    "kept. Raise max_memory, keep fewer tensors, or give capture() a path."
                )
            if self._tensors_fit:
                self._used += nbytes
            return self._tensors_fit

    def _has_room_in_ring(self, name: str, step: int, nbytes: int) -> bool:
        fits = self._used + nbytes <= self._bound * TENSOR_SHARE
        if fits:
            self._used += nbytes
        elif self._ring_fits:
            self._ring_fits = False
            self._notices.append(
                f"{self._limit()} has no room for all tensors of the ring, first in step {step} for {name}. Raise "
                "max_memory, choose fewer modules or steps for the ring, or give capture() a path."
            )
        return fits

    def _charge_line(self, step: int, subject: Hashable, value: Mapping[str, Any]) -> None:
        size = _CALL_BYTES + 2 * len(json.dumps(value))
        self._charge(size)
        with self._lock:
            self._lines.setdefault(subject, []).append((step, size))

    def _charge(self, nbytes: int) -> None:
        with self._lock:
            if self._used + nbytes > self._bound:
                raise StoreWriteError(
                    f"{self.path} is full: {self._limit()} holds {self._index.appended:,} records. Raise max_memory, "
                    "record fewer steps, modules or kinds, or give capture() a path."
                )
            self._used += nbytes

    def _limit(self) -> str:
        return f"max_memory={self._bound} ({_size(self._bound)})"


def _step_of(batch: Any) -> int:
    """Return the step of a batch whose rows all are of one."""
    return int(batch.column("step")[-1].as_py()) if batch.num_rows else -1


class _FirstRows:
    """The first of some rows, used if there is no room for all of them."""

    may_wait = gathers = False

    def __init__(self, rows: Rows, count: int) -> None:
        self._rows = rows
        self._count = count

    def __len__(self) -> int:
        return self._count

    def join(self, others: Sequence[Any]) -> None:
        raise NotImplementedError("they are the last of a run")

    def arrive(self) -> None:
        self._rows.arrive()

    def columns(self) -> Mapping[str, Any]:
        return {name: column[: self._count] for name, column in self._rows.columns().items()}


_writers: WeakSet[MemoryWriter] = WeakSet()
_WORTH_COLLECTING = 64 << 20
"""Bytes of earlier runs that justify a collection, which takes a quarter of a second in a program with torch."""


@dataclass(frozen=True)
class _Beside:
    """The contents of a rank beside its records and tensors."""

    calls: Calls
    loop: LoopFacts
    status: RankStatus
    coverage: CoverageFile


class _MemorySource(RunSource):
    """One rank that a MemoryWriter holds. A location's offset is the number of the tensor."""

    in_memory = True

    def __init__(
        self,
        path: Path,
        info: dict[str, Any],
        index: Index,
        tensors: Mapping[int, ByteArray],
        beside: _Beside,
        record_bytes: int,
    ) -> None:
        super().__init__(path, info, [index.rank])
        self.tensors = tensors
        self.record_bytes = record_bytes
        self._index = index
        self._beside = beside
        self._status, self._coverage = beside.status, beside.coverage

    def read_index(self, rank: int) -> Index:
        return self._index

    def view(self, record: Record) -> memoryview:
        return self.tensors[kept_location(record).offset].data.toreadonly()

    def address(self, rank: int, file: str) -> str:
        return str(self.path)  # for messages: there is no file

    def finished(self) -> bool:
        return self._status.status == "finished"

    def failure(self) -> str:
        return (self._status.reason or "no reason was given") if self._status.status == "failed" else ""

    def mesh(self, rank: int) -> Mesh | None:
        return self._status.mesh

    def renames(self, rank: int) -> Mapping[str, str]:
        return self._status.renames

    def calls(self, rank: int) -> Calls:
        return self._beside.calls

    def loop(self, rank: int) -> LoopFacts:
        return self._beside.loop

    def coverage(self) -> dict[int, list[Coverage]]:
        return {self._index.rank: self._coverage.modules}

    def notices(self) -> list[str]:
        found = []
        rank, world = self._index.rank, self.info.get("world", 1)
        if world > 1:
            found.append(f"it holds rank {rank} of {world} alone: in memory, each process has its own run")
        if self._status.status == "failed":
            found.append(f"rank {rank}: it failed: {self.failure()}")
        elif not self.finished():
            so_far = len(self._index)
            found.append(f"rank {rank}: it was not closed: it is still running, or was killed; {so_far} records so far")
        dropped = [str(self._index.dropped)] if self._index.dropped else []
        return found + [f"rank {rank}: {text}" for text in dict.fromkeys([*dropped, *self._coverage.notices])]


class MemoryRun(Run):
    """A run held in memory, as `tensortap.capture(model)` records it. Its memory is freed with the last reference."""

    source: _MemorySource

    def __init__(self, source: _MemorySource) -> None:
        super().__init__(source)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that its tensors and records take."""
        return sum(tensor.nbytes for tensor in self.source.tensors.values()) + self.source.record_bytes

    def __repr__(self) -> str:
        counts = (len(self.steps), "step"), (len(self), "record"), (len(self.source.tensors), "tensor")
        parts = [f"{number} {noun}{'s' * (number != 1)}" for number, noun in counts]
        return f"<{self.path}: {', '.join(parts)}, {_size(self.nbytes)}>"


def _size(nbytes: int) -> str:
    """
    >>> _size(3 << 19)
    '1.5 MiB'
    """
    unit, name = next(((unit, name) for unit, name in _UNITS if nbytes >= unit), _UNITS[-1])
    return f"{nbytes / unit:.1f} {name}"


_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
