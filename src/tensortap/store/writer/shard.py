"""One writer of tensors: a stream of safetensors files, a share of the slabs, and the thread that writes them out.

The caller's side decides at once where a tensor goes, and copies it into slabs. A slab that is full, or sealed because
a caller waits for its bytes, goes to the thread. Small tensors share a slab, and so a write. Without a route, the
caller's thread writes, which saves a copy. This is faster if all cores compute: a thread that takes one of them makes
the others wait at their next barrier.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core.file_io import BINARY, write_at
from tensortap.core.host_copies import DeviceBytes
from tensortap.core.records import Location
from tensortap.store.format import PARTIAL
from tensortap.store.writer.arena import Slab
from tensortap.store.writer.header import Header, room_for
from tensortap.store.writer.pool import SlabShare
from tensortap.store.writer.route import BLOCK, Route
from tensortap.store.writer.state import WriterState

__all__ = ["Shard"]

FIRST_REGION = 16 << 10
LARGEST_REGION = 16 << 20  # safetensors refuses headers beyond 100 MB
LARGEST_FILE = 4 << 30


class _Job(NamedTuple):
    act: Callable[[], None]
    slab: Slab | None = None
    nbytes: int = 0


class _File:
    """The caller's side of the file that is being filled."""

    def __init__(self, name: str, step: int, region: int) -> None:
        self.name = name
        self.step = step
        self.header = Header(region)
        self.end = self.header.region

    @property
    def data(self) -> int:
        return self.end - self.header.region


class Shard:
    """Any thread may call `put` and `finish`; they run one at a time."""

    def __init__(
        self,
        folder: Path,
        new_name: Callable[[int], str],
        slabs: SlabShare,
        state: WriterState,
        route: Route | None,
        rotates: bool = False,
    ) -> None:
        self.largest_file = LARGEST_FILE
        self._threaded = route is not None
        self._route = route or Route(possible=False, favour=1)
        self._folder = folder
        self._new_name = new_name
        self._state = state
        self._slabs = slabs
        self._entry = threading.Lock()
        self._file: _File | None = None
        self._slab: Slab | None = None
        self._fill = 0
        self._carried = 0
        """Bytes at the slab's start that the thread has to fill in: the end of a block that the last slab left."""
        self._left_over = 0
        self._coming: list[Callable[[], None]] = []
        """Functions that wait until the slab's bytes have arrived."""
        self._rotates = rotates
        self._rotating: dict[int, list[_File]] = {}
        """Files of a ring by step, which `discard` may delete."""
        self._region = FIRST_REGION
        self._needed = 0  # header bytes of this step so far, over all its files
        # Shared with the thread, under the state's lock:
        self._due = state.condition()
        self._jobs: deque[_Job] = deque()
        self._submitted = 0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.done = 0
        self.pending = 0
        """Bytes in transit to the disk."""
        self.written = 0
        self.discarded = 0
        """Bytes of files that were deleted again."""
        self.files = 0
        # The thread's own:
        self._fd = self._direct = -1
        self._path = folder
        self._whole = 0
        """Bytes at the start of the current file that are written."""
        self._tail = b""

    @property
    def depth(self) -> int:
        return len(self._jobs)

    def put(
        self,
        step: int,
        name: str,
        dtype: str,
        shape: Sequence[int],
        nbytes: int,
        parts: Iterable[npt.NDArray[np.uint8] | DeviceBytes],
    ) -> Location:
        """Copy a tensor's bytes, and return where they will be."""
        with self._entry:
            self._state.check()
            file = self._file
            if file is not None and file.step != step:
                self._finish()
                file = None
            if file is not None and file.data and file.data + nbytes > self.largest_file:
                file = self._open(step)
            if file is None:
                file = self._open(step, room_for(name, dtype, shape, nbytes))
            entry = file.header.plan(name, dtype, shape, file.data, file.data + nbytes)
            if entry is None:
                self._region = min(4 * self._region, LARGEST_REGION)
                file = self._open(step, room_for(name, dtype, shape, nbytes))
                entry = file.header.plan(name, dtype, shape, 0, nbytes)
                assert entry is not None  # ensured by room_for
            location = Location(file.name, file.end, nbytes)
            try:
                for part in parts:
                    self._copy(file, part)
            except BaseException:
                self._take_back(file, location.offset)
                raise
            file.header.add(entry)
            return location

    def seal(self) -> int:
        """Submit the current slab. Return the ticket that `done` reaches once everything so far is written."""
        with self._entry:
            if self._file is not None:
                self._submit_slab(self._file)
            return self._submitted

    def split(self) -> int:
        """Complete the current file within its step. Return the ticket that `done` reaches once it has its name."""
        with self._entry:
            if self._file is not None:
                self._complete(self._file)
            return self._submitted

    def finish(self, step: int | None = None) -> None:
        """Complete the current file if it belongs to this step; None means any step."""
        with self._entry:
            if self._file is not None and step in (None, self._file.step):
                self._finish()

    def discard(self, step: int) -> None:
        """Delete the files of a step, after all waiting writes into them."""
        with self._entry:
            if self._file is not None and self._file.step == step:
                self._finish()
            if files := self._rotating.pop(step, []):
                self._submit(_Job(partial(self._do_discard, files)))

    def settle(self) -> None:
        """Wait, after a failure, until the thread has discarded its jobs. Call with the state's `changed` held."""
        while self.done < self._submitted:
            self._state.changed.wait()

    def has_written(self, name: str, end: int) -> bool:
        """Return whether `name` is the current file and written up to `end`, after `settle`."""
        return self._path == self._folder / (name + PARTIAL) and end <= self._whole

    def stop(self) -> None:
        """End the thread after its last job."""
        with self._due:
            self._stopping = True
            self._due.notify_all()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._close()

    # The caller's side, with _entry held.

    def _open(self, step: int, least: int = 0) -> _File:
        if self._file is not None:
            self._complete(self._file)
        self._file = _File(self._new_name(step), step, max(self._region, least))
        if self._rotates:
            self._rotating.setdefault(step, []).append(self._file)
        self._left_over = 0
        self._submit(_Job(partial(self._do_open, self._file.name)))
        return self._file

    def _complete(self, file: _File) -> None:
        self._submit_slab(file)
        self._needed += file.header.used
        self._submit(_Job(partial(self._do_finish, file.name, file.header, file.end)))
        self._file = None

    def _finish(self) -> None:
        """Complete the file of a step that ends. The next step needs a header of about the same size."""
        assert self._file is not None
        self._complete(self._file)
        self._region = min(self._needed * 5 // 4 + 512, LARGEST_REGION)
        self._needed = 0

    def _copy(self, file: _File, part: npt.NDArray[np.uint8] | DeviceBytes) -> None:
        if not self._threaded and isinstance(part, np.ndarray):
            self._submit_slab(file)
            self._write_through(file, part)
            return
        at = 0
        while at < part.size:
            if self._slab is None:
                self._slab = self._slabs.take()
                self._fill = self._carried = self._left_over
            count = min(self._slab.size - self._fill, part.size - at)
            target = self._slab[self._fill : self._fill + count]
            if isinstance(part, np.ndarray):
                target[:] = part[at : at + count]
            else:
                self._coming.append(part.copy(target, at))
            self._fill += count
            at += count
            file.end += count
            if self._fill == self._slab.size:
                self._submit_slab(file)

    def _write_through(self, file: _File, part: npt.NDArray[np.uint8]) -> None:
        self._run(partial(self._do_write, part, part.size, file.end))
        self._state.check()
        file.end += part.size

    def _take_back(self, file: _File, end: int) -> None:
        """Undo an interrupted copy. Bytes that were already written are beyond `end`: overwritten or cut off later."""
        self._fill = max(0, self._fill - (file.end - end))
        self._carried = min(self._carried, self._fill)
        self._left_over = 0
        file.end = end

    def _submit_slab(self, file: _File) -> None:
        """Send the slab out. The end of a block that it does not fill is sent again with the next slab, so that each
        slab begins on a block."""
        slab, self._slab = self._slab, None
        if slab is not None:
            self._left_over = self._fill % BLOCK if self._fill < slab.size else 0
            coming, self._coming = self._coming, []
            act = partial(self._do_write_slab, slab, self._fill, file.end - self._fill, self._carried, coming)
            self._submit(_Job(act, slab, self._fill))
            self._fill = self._carried = 0

    def _run(self, act: Callable[[], None]) -> None:
        """Run a job on the calling thread. Keep its failure, as the writer's thread does."""
        if self._state.failure is None:
            try:
                act()
            except Exception as error:
                self._cut_off()
                self._state.fail(error, self._path)

    def _submit(self, job: _Job) -> None:
        if not self._threaded:
            self._run(job.act)
            if job.slab is not None:
                with self._state.changed:
                    self._slabs.give(job.slab)
                    self._state.changed.notify_all()
            return
        with self._due:
            self._jobs.append(job)
            self._submitted += 1
            self.pending += job.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tensortap-shard", daemon=True)
                self._thread.start()
            self._due.notify_all()

    # The thread's side.

    def _work(self) -> None:
        changed = self._state.changed
        while True:
            with self._due:
                while not self._jobs and not self._stopping:
                    self._due.wait()
                if not self._jobs:
                    break
                job = self._jobs.popleft()
            # After a failure jobs are discarded, so that no thread waits for a slab or a ticket.
            if self._state.failure is None:
                try:
                    job.act()
                except BaseException as error:  # the caller must see any failure
                    self._cut_off()
                    self._state.fail(error, self._path)
            with changed:
                self.done += 1
                self.pending -= job.nbytes
                if job.slab is not None:
                    self._slabs.give(job.slab)
                changed.notify_all()
        self._close()

    def _close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1

    def _cut_off(self) -> None:
        """Remove the part of a failed write, to leave room for the rows of the tensors before it."""
        with suppress(OSError):  # the first error is the one that counts
            if self._fd >= 0:
                os.ftruncate(self._fd, self._whole)

    def _do_open(self, name: str) -> None:
        self._path = self._folder / (name + PARTIAL)
        self._whole = 0
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)

    def _do_write_slab(
        self, slab: Slab, count: int, offset: int, carried: int, coming: Sequence[Callable[[], None]]
    ) -> None:
        for arrive in coming:
            arrive()
        slab[:carried] = np.frombuffer(self._tail, np.uint8)[:carried]
        left_over = count % BLOCK if count < slab.size else 0
        self._tail = bytes(slab[count - left_over : count])
        self._do_write(slab, count, offset)

    def _do_write(self, slab: Slab, count: int, offset: int) -> None:
        view, past = slab.data[:count], 0
        if count >= BLOCK and offset % BLOCK == 0 and self._route.use_direct():
            past = self._write_direct(view[: count - count % BLOCK], offset)
        if past < count:
            with self._route.timed(False, count - past):
                self._write_all(view[past:], offset + past)
        self.written += count
        self._whole = offset + count

    def _write_direct(self, view: memoryview, offset: int) -> int:
        """Write with direct I/O; return the number of bytes written. If the file system refuses, disable direct I/O."""
        written = 0
        try:
            with self._route.timed(True, len(view)):
                if self._direct < 0:
                    self._direct = os.open(self._path, os.O_WRONLY | os.O_DIRECT)
                while written < len(view):
                    written += os.pwrite(self._direct, view[written:], offset + written)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._route.disable_direct()
        return written

    def _do_finish(self, name: str, header: Header, end: int) -> None:
        os.ftruncate(self._fd, end)  # an interrupted copy may have left bytes behind the last tensor
        self._write_all(memoryview(header.pack()), 0)
        self._close()
        self._path.rename(self._folder / name)
        self.files += 1

    def _do_discard(self, files: Sequence[_File]) -> None:
        for file in files:
            (self._folder / file.name).unlink()
            self.discarded += file.data
            self.files -= 1

    def _write_all(self, view: memoryview, offset: int) -> None:
        while view:
            count = write_at(self._fd, view, offset)
            view, offset = view[count:], offset + count
