"""RunWriter: writes one rank of a run to disk while the run continues.

Tensors go through shards, records through the index; each has its own threads. The caller waits only if the buffers
are full. A kill at any moment leaves a readable index, and every location in it is readable. Data survives the process,
as after write(), but not a power failure.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.host_copies import DeviceBytes, MemoryPinning
from tensortap.core.machine import cores, memory, neighbours
from tensortap.core.placement import Mesh, Placement
from tensortap.core.records import Coverage, Location
from tensortap.core.sketches import FULL
from tensortap.errors import TensortapError, UsageError
from tensortap.store.calls import CallEntry, CallsWriter
from tensortap.store.folder import claim, discard, overwrite_json, write_json
from tensortap.store.format import (
    CALLS,
    COVERAGE_JSON,
    FORMAT,
    INDEX,
    LOOP,
    PLACEMENTS,
    PROGRESS_JSON,
    RANK_FORMAT,
    RANK_JSON,
    shard_name,
)
from tensortap.store.lines import LinesWriter
from tensortap.store.loop import LoopFact, LoopWriter
from tensortap.store.rotation import RemainingSteps
from tensortap.store.writer.index import IndexWriter
from tensortap.store.writer.index_file import IndexFile
from tensortap.store.writer.pieces import pieces
from tensortap.store.writer.pool import SlabPool
from tensortap.store.writer.rank_writer import RankWriter, now, storable_dtype
from tensortap.store.writer.route import Route, supports_direct_io
from tensortap.store.writer.shard import Shard
from tensortap.store.writer.state import write_error

__all__ = ["RunWriter"]

DEFAULT_BUFFER = 256 << 20
_MOST_PINNED = 4 << 30
_STATUS_BYTES = 4096
"""Size of rank.json while the run is written: it reserves room for the reason if the disk is full at the end."""


class RunWriter(RankWriter):
    """Writes one rank of a run. All methods may be called from any thread.

    >>> with RunWriter("runs/a", info={"framework": "torch"}) as writer:       # doctest: +SKIP
    ...     where = writer.put("fc1 output 0", array, step=0)
    ...     writer.append(Record(..., location=where))
    ...     writer.end_step(0)

    `info` becomes part of run.json. `max_buffer` bounds the bytes that wait for the disk; `writers` is how
    many threads write tensors, each to a file of its own. `crowded`: the run itself needs every core of the
    machine. `pinning` is for tensors that come from a device. `calls` says that plain arguments are kept, even if no
    call has any, and `loop` that loop facts are. `buckets` is the size of the sketches in the index. `ring` says
    that some tensors go into a ring, which has writers of its own; `rotates` that records may be dropped, too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = 0,
        world: int = 1,
        info: Mapping[str, Any],
        overwrite: bool = False,
        max_buffer: int | None = None,
        writers: int | None = None,
        crowded: bool = False,
        pinning: MemoryPinning | None = None,
        calls: bool = False,
        loop: bool = False,
        buckets: int = FULL,
        ring: bool = False,
        rotates: bool = False,
    ) -> None:
        count = _default_writers(pinning is not None) if writers is None else writers
        buffer = _default_buffer(pinning is not None) if max_buffer is None else max_buffer
        if count < 1 or buffer < 1:
            raise UsageError(f"writers and max_buffer must be positive: writers {count}, max_buffer {buffer}")
        super().__init__(Path(path), rank, world, info)
        self._recording = secrets.token_hex(8)
        """Distinguishes this recording from another one of the same rank at the same place."""
        try:
            self._folder = claim(self.path, rank, world, self._info, overwrite)
            self._write_status("running", "")
        except TensortapError:
            raise
        except OSError as error:
            raise write_error(error, self.path, begun=False) from error
        self._numbers: dict[tuple[int, bool], int] = {}
        self._numbers_lock = threading.Lock()
        past = supports_direct_io(self._folder)
        # If the run needs every core, a thread that occupies one costs more than it saves.
        threaded = past or not crowded
        route = Route(past, favour=8 if crowded else 2) if threaded else None
        self._pool = SlabPool(buffer, count * (2 if ring else 1), self._state, pinning)
        self._lasting, self._rotating = (
            [
                Shard(self._folder, partial(self._new_name, rotates), self._pool.share(), self._state, route, rotates)
                for _ in range(count if ring or not rotates else 0)
            ]
            for rotates in (False, True)
        )
        self._shards = self._lasting + self._rotating
        self._lines: list[LinesWriter] = []
        """Files whose lines are written before the index's rows."""
        self._calls: CallsWriter | None = None
        self._loop: LoopWriter | None = None
        self._placement_lines: LinesWriter | None = None
        try:
            if calls:
                self._calls = CallsWriter(self._folder / CALLS, self._state, rotates)
                self._lines.append(self._calls)
            if loop:
                self._loop = LoopWriter(self._folder / LOOP, self._state, rotates)
                self._lines.append(self._loop)
            file = IndexFile(self._folder / INDEX, rotates, self._drop_lines)
            self._index = IndexWriter(
                file, self._barrier, self._state, buckets, self._placements, by_step=rotates, has_bytes=self._has_bytes
            )
        except BaseException:
            for lines in self._lines:
                lines.close()
            raise

    def put(self, name: str, array: npt.NDArray[Any], *, step: int, ring: bool = False) -> Location:
        """Keep an array's bytes; it may change once this returns. `name` is its name in the file's header."""
        array = np.asarray(array)
        dtype = storable_dtype(name, array)
        parts = pieces(array, self._pool.slab_bytes)
        return self._pick(step, ring).put(step, name, dtype, array.shape, array.nbytes, parts)

    def put_incoming(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        parts: Iterable[DeviceBytes],
        *,
        step: int,
        ring: bool = False,
    ) -> Location:
        """Keep bytes in C order that a device sends. They may still be in transit when this returns."""
        nbytes = prod(shape) * dtypes.numpy_dtype(dtype).itemsize
        return self._pick(step, ring).put(step, name, dtype, shape, nbytes, parts)

    def release(self, step: int) -> None:
        """Delete the files of a ring that hold this step, once they are written."""
        self._check_open()
        for shard in self._rotating:
            shard.discard(step)
        with self._numbers_lock:
            self._numbers = {(at, ring): number for (at, ring), number in self._numbers.items() if at > step}

    def _drop_lines(self, remaining: RemainingSteps) -> None:
        for lines in self._lines:
            lines.drop_all_but(remaining)

    def called(self, step: int, micro: int, module: str, call: int, arguments: Mapping[str, Any]) -> None:
        """Keep the plain arguments of a call, as `core.arguments` writes them.

        The caller reports them before the call's records, and only if they differ from the module's previous call.
        """
        self._check_open()
        assert self._calls is not None, "calls=True says that plain arguments are kept"
        self._calls.add(CallEntry(step, micro, module, call, arguments))

    def loop_fact(self, step: int, fact: str, of: str, value: Mapping[str, Any]) -> None:
        self._check_open()
        assert self._loop is not None, "loop=True says that loop facts are kept"
        self._loop.add(LoopFact(step, fact, of, value))

    def arrange(self, mesh: Mesh | None, renames: Mapping[str, str]) -> None:
        super().arrange(mesh, renames)
        try:
            self._write_status("running", "")
        except OSError as error:
            raise write_error(error, self._folder / RANK_JSON) from error

    def _add_placement(self, placement: Placement) -> None:
        if self._placement_lines is None:  # most runs have none, and no file
            self._placement_lines = LinesWriter(self._folder / PLACEMENTS, self._state)
            self._lines.append(self._placement_lines)
        self._placement_lines.add_line(placement.as_dict())

    def end_step(self, step: int) -> None:
        """Complete the step's files and send its rows out, without waiting for the disk."""
        self._check_open()
        self._state.check()
        for shard in self._shards:
            shard.finish(step)
        self._index.hurry(step_is_over=True)

    def coverage(self, rows: Sequence[Coverage], notices: Sequence[str] = ()) -> None:
        """Store the coverage of each module, in place of what was stored before."""
        self._check_open()
        value = {"modules": [row.as_dict() for row in rows], "notices": list(notices)}
        try:
            write_json(self._folder / COVERAGE_JSON, value)
        except OSError as error:
            raise write_error(error, self._folder / COVERAGE_JSON) from error

    def progress(self, value: Mapping[str, Any]) -> None:
        """Write the progress of the run, in place of the earlier one. A failure has no consequence."""
        with suppress(OSError):
            write_json(self._folder / PROGRESS_JSON, value)

    def stats(self) -> dict[str, Any]:
        """Return statistics of the written data, and the time that the caller waited for it."""
        return {
            "bytes": sum(shard.written - shard.discarded for shard in self._shards) + self._index.nbytes,
            "records": self._index.records,
            "files": sum(shard.files for shard in self._shards),
            "stalled_seconds": self._state.stalled,
            "queued": sum(shard.depth for shard in self._shards),
            "peak_buffer_bytes": self._pool.peak,
        }

    def close(self, status: str = "finished", reason: str = "") -> None:
        """Write all waiting data, complete all files, and end the threads. A second call does nothing.

        Raises the failure of a background write, unless an earlier call already has.
        """
        with self._closing:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            for shard in self._shards:
                shard.finish()
            self._index.stop()
            for shard in self._shards:
                shard.stop()
            for shard in self._shards:
                shard.join()
            for lines in self._lines:
                lines.close()
            self._pool.release()
        failure = self._state.failure
        try:
            self._write_status(*(("failed", str(write_error(*failure))) if failure else (status, reason)))
        except OSError as error:
            self._state.fail(error, self._folder / RANK_JSON)
        if not self._state.reported:
            self._state.check()

    def delete(self) -> None:
        discard(self.path, self.rank)

    def _pick(self, step: int, ring: bool) -> Shard:
        self._check_open()
        if step < 0:
            raise UsageError(f"step must not be negative: {step}")
        return min(self._rotating if ring else self._lasting, key=lambda shard: shard.pending)

    def _barrier(self) -> bool:
        if not all(lines.write() for lines in self._lines):
            return False
        tickets = [(shard, shard.seal()) for shard in self._shards]
        with self._state.changed:
            return self._state.wait_for(lambda: all(shard.done >= ticket for shard, ticket in tickets))

    def _has_bytes(self, files: Sequence[str], ends: Sequence[int]) -> list[bool] | None:
        """Return for each tensor whether its bytes are written, after a failure; None if no row can be written."""
        if not all(lines.write() for lines in self._lines):
            return None
        with self._state.changed:
            for shard in self._shards:
                shard.settle()
        finished = {name for name in set(files) if name and (self._folder / name).exists()}
        return [
            bool(name) and (name in finished or any(shard.has_written(name, end) for shard in self._shards))
            for name, end in zip(files, ends, strict=True)
        ]

    def _new_name(self, ring: bool, step: int) -> str:
        with self._numbers_lock:
            number = self._numbers.get((step, ring), 0)
            self._numbers[step, ring] = number + 1
        return shard_name(step, number, ring)

    def _write_status(self, status: str, reason: str) -> None:
        running = status == "running"
        counts = {} if running else self.stats()
        value = {
            "format": RANK_FORMAT,
            "version": FORMAT,
            "rank": self.rank,
            "status": status,
            "reason": reason,
            "started": self._started,
            "finished": None if running else now(),
            "recording": self._recording,
            "pid": self._pid,
            "host": socket.gethostname(),
            "records": counts.get("records"),
            "files": counts.get("files"),
            "bytes": counts.get("bytes"),
            "mesh": None if self._mesh is None else self._mesh.as_dict(),
            "renames": dict(self._renames),
        }
        path = self._folder / RANK_JSON
        if running:
            write_json(path, value, reserve=_STATUS_BYTES + len(json.dumps(value)))
            return
        try:
            write_json(path, value)
        except OSError:
            # The disk may be full. The file has room for this, so that its status does not stay "running".
            overwrite_json(path, value, shortened="reason")


def _default_writers(from_device: bool) -> int:
    """Return one writer for a small machine, where more would take cores from the run, and a few for a large one. A run
    that computes on a device leaves all but one core to the writers."""
    if from_device:
        return max(1, (cores() - 1) // neighbours())
    return max(1, min(4, cores() // 4))


def _default_buffer(from_device: bool) -> int:
    """Return a larger buffer for a device, which fills buffers with large tensors faster than a disk empties them."""
    return max(DEFAULT_BUFFER, min(_MOST_PINNED, memory() // 32 // neighbours())) if from_device else DEFAULT_BUFFER
