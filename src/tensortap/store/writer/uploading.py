"""UploadingWriter: writes one rank of a run into an object store, by way of a bounded spool on this disk.

The spool is a run like any other. A thread uploads files of tensors once they are finished, and then the rows and lines
that are new, as segments. Uploaded data is deleted here. A full spool slows the run. A network that stays broken stops
the recording, and the spool stays for `tensortap upload`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.host_copies import DeviceBytes
from tensortap.core.interrupts import suppress_errors
from tensortap.core.placement import Mesh
from tensortap.core.records import Coverage, Location
from tensortap.core.urls import Url
from tensortap.errors import StoreWriteError, TensortapError, UsageError
from tensortap.store.format import COVERAGE_JSON, INDEX, PROGRESS_JSON, RANK_JSON
from tensortap.store.upload import UPLOAD_JSON, delete_rank, remove_spool
from tensortap.store.writer.rank_upload import RankUpload, claim_url
from tensortap.store.writer.run_writer import RunWriter

__all__ = ["UploadingWriter", "spool_folder"]

DEFAULT_SPOOL = 8 << 30
DEFAULT_TIMEOUT = 300.0
AGE = 10.0
"""Seconds after which new rows are uploaded."""
SEGMENT = 8 << 20
"""Bytes of new rows that are uploaded at once."""
_LEAST_SPOOL = 1 << 20
_LONGEST_PAUSE = 15.0


class UploadingWriter(RunWriter):
    """A RunWriter whose run is at a URL. `path` is that URL.

    spool: the folder for data that is not uploaded yet. None is the environment variable TENSORTAP_SPOOL, or a folder
        of the system for temporary files.
    spool_size: upper bound on its bytes.
    upload_timeout: seconds without any progress after which the network counts as broken.
    """

    def __init__(
        self,
        url: Url,
        *,
        rank: int = 0,
        world: int = 1,
        info: Mapping[str, Any],
        overwrite: bool = False,
        spool: str | os.PathLike[str] | None = None,
        spool_size: int | None = None,
        upload_timeout: float | None = None,
        **options: Any,
    ) -> None:
        if "?" in url.address:
            raise UsageError(f"{url}: a run cannot be written to a URL with a query: name a bucket and a folder")
        self._limit = DEFAULT_SPOOL if spool_size is None else spool_size
        if self._limit < _LEAST_SPOOL:
            raise UsageError(f"spool_size must be at least {_LEAST_SPOOL:,} bytes, not {self._limit:,}")
        self._url = url
        folder = spool_folder(url, rank, spool)
        self.defers_rows = bool(options.get("rotates"))
        """Whether rows are uploaded at the end: a ring drops some of them again, and thereby bounds the index."""
        self._spooled = 0
        """Bytes of tensors that are not uploaded yet."""
        super().__init__(folder, rank=rank, world=world, info=info, **options)
        self.path: Any = url
        for shard in self._shards:
            shard.largest_file = max(_LEAST_SPOOL, min(shard.largest_file, self._limit // (4 * len(self._shards))))
        self._uploader = _Uploader(self, url, folder, DEFAULT_TIMEOUT if upload_timeout is None else upload_timeout)
        try:
            claim_url(url, rank, world, self._info, overwrite)
            (folder / UPLOAD_JSON).write_text(
                json.dumps({"format": "tensortap-upload", "url": url.address, "rank": rank})
            )
            self._uploader.begin()
        except BaseException:
            self._abandon(folder)
            raise

    def put(self, name: str, array: npt.NDArray[Any], *, step: int, ring: bool = False) -> Location:
        if not ring:
            self._reserve(int(np.asarray(array).nbytes))
        return super().put(name, array, step=step, ring=ring)

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
        if not ring:
            self._reserve(prod(shape) * dtypes.numpy_dtype(dtype).itemsize)
        return super().put_incoming(name, dtype, shape, parts, step=step, ring=ring)

    def end_step(self, step: int) -> None:
        super().end_step(step)
        self._uploader.notify()
        self._reserve(0)

    def arrange(self, mesh: Mesh | None, renames: Mapping[str, str]) -> None:
        super().arrange(mesh, renames)
        self._uploader.show_status()

    def flush(self) -> None:
        """Wait until all data that was put and appended so far is uploaded."""
        super().flush()
        self._uploader.flush()

    def coverage(self, rows: Sequence[Coverage], notices: Sequence[str] = ()) -> None:
        super().coverage(rows, notices)
        self._uploader.notify()

    def close(self, status: str = "finished", reason: str = "") -> None:
        """Write and upload all waiting data, and end the threads. A second call does nothing.

        If it cannot be uploaded, the spool stays, and the error names the command that finishes the upload.
        """
        if self._closed or os.getpid() != self._pid:
            return
        try:
            super().close(status, reason)
        finally:
            self._uploader.finish()

    def delete(self) -> None:
        with suppress_errors():
            delete_rank(self._url, self.rank)

    def interrupt(self) -> list[str]:
        left = self._uploader.interrupt()
        with suppress(TensortapError):  # the interrupt is what the user sees
            super().close("failed", "the upload was interrupted")  # the spool is completed, for `tensortap upload`
        return left

    def stats(self) -> dict[str, Any]:
        return super().stats() | {"spooled_bytes": self._spooled, "uploaded_bytes": self._uploader.uploaded}

    def split_files(self) -> bool:
        """Complete the files of tensors that are being written, so that they can be uploaded; False on a failure."""
        tickets = [(shard, shard.split()) for shard in self._lasting]
        with self._state.changed:
            return self._state.wait_for(lambda: all(shard.done >= ticket for shard, ticket in tickets))

    def release_spooled(self, nbytes: int) -> None:
        """Note that this number of bytes of tensors has left the spool."""
        with self._state.changed:
            self._spooled -= nbytes
            self._state.changed.notify_all()

    @property
    def waiting_rows(self) -> int:
        """Bytes of the index that are due for upload."""
        return 0 if self.defers_rows else self._index.nbytes - self._uploader.rows_end

    def index_bytes(self) -> int:
        """Return the bytes of all whole batches of the index so far."""
        return self._index.nbytes

    @property
    def is_crowded(self) -> bool:
        """Whether the spool is so full that files must be completed before their step ends."""
        return self._spooled + self.waiting_rows > self._limit // 2

    def check_upload(self) -> None:
        """Raise the failure of the writer, if there is one."""
        self._state.check()

    @property
    def is_reported(self) -> bool:
        """Whether the caller knows of a failure."""
        return self._state.reported

    def fail_upload(self, error: BaseException) -> None:
        self._state.fail(error, self.path)

    def _reserve(self, nbytes: int) -> None:
        """Wait until the spool has room. A tensor that is larger than the spool waits until that is empty."""
        state = self._state
        with state.changed:
            if self._has_no_room(nbytes):
                since = time.monotonic()
                while state.failure is None and self._has_no_room(nbytes):
                    self._uploader.notify(urgent=True)
                    state.changed.wait(1.0)
                    self._uploader.check_progress()
                state.stalled += time.monotonic() - since
            self._spooled += nbytes
        if nbytes:
            state.check()

    def _has_no_room(self, nbytes: int) -> bool:
        held = self._spooled + self.waiting_rows
        return held > 0 and held + nbytes > self._limit

    def _abandon(self, folder: Path) -> None:
        """Remove an empty spool: nothing was recorded, because the URL cannot be used."""
        super().close("failed", "the URL cannot be written")
        self._closed = True
        remove_spool(folder, self.rank)


class _Uploader:
    """The thread that uploads. Errors are retried until nothing has moved for `patience` seconds."""

    def __init__(self, writer: UploadingWriter, url: Url, spool: Path, patience: float) -> None:
        self._writer = writer
        self._url = url
        self._spool = spool
        self._patience = patience
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._urgent = False
        self._closing = False
        self._gave_up = False
        self._wanted = self._passed = 0
        """Number of complete passes that callers wait for, and that are done."""
        self._cut = time.monotonic()
        self._moved = time.monotonic()
        self._busy = False
        self._error: BaseException | None = None
        self.uploaded = 0
        self._rank = RankUpload(writer._folder, url, writer.rank, frees=True, advanced=self._advance)

    @property
    def rows_end(self) -> int:
        return self._rank.ends.get(INDEX, 0)

    def begin(self) -> None:
        """Show that the rank is running. An error here is that of a URL that cannot be used."""
        self.show_status()
        self._thread = threading.Thread(target=self._work, name="tensortap-upload", daemon=True)
        self._thread.start()

    def show_status(self) -> None:
        """Upload rank.json while the rank is running."""
        self._rank.upload_small(RANK_JSON)

    def notify(self, urgent: bool = False) -> None:
        with self._changed:
            self._urgent = self._urgent or urgent
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until a pass that begins now is done."""
        with self._changed:
            wanted = self._wanted = self._passed + (2 if self._busy else 1)
            self._changed.notify_all()
        while self._passed < wanted and not self._gave_up:
            with self._changed:
                self._changed.wait(0.2)
            self.check_progress()
        self._writer.check_upload()

    def finish(self) -> None:
        """Upload the rest and rank.json, remove the spool, and end the thread. Raise StoreWriteError if that fails."""
        if self._thread is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        while self._thread.is_alive() and not self._gave_up:
            self._thread.join(0.2)
            self.check_progress()
        if (self._gave_up or self._error is not None) and not self._writer.is_reported:
            raise StoreWriteError(f"{self._reason()} {self._hint()}")

    def interrupt(self) -> list[str]:
        """End the thread after the object that it uploads; return the command that continues."""
        if self._thread is None or not self._thread.is_alive():
            return []
        self._gave_up = True
        self.notify()
        return [f"the upload to {self._url} was interrupted. {self._hint()}"]

    def check_progress(self) -> None:
        """Give up if nothing has moved for too long, also if a driver hangs."""
        if self._busy and not self._gave_up and time.monotonic() - self._moved > self._patience:
            self._give_up()

    def _give_up(self) -> None:
        self._gave_up = True
        self._writer.fail_upload(StoreWriteError(f"{self._reason()} {self._hint()}"))

    def _reason(self) -> str:
        if self._error is not None:
            return str(self._error)
        return f"{self._url} could not be written: nothing was transferred for {self._patience:.0f} seconds."

    def _hint(self) -> str:
        return f"The rest is kept: finish with `tensortap upload {self._spool}`"

    def _advance(self, nbytes: int) -> None:
        self._moved = time.monotonic()
        self._error = None
        self.uploaded += nbytes

    def _work(self) -> None:
        pause = 0.5
        while not self._gave_up:
            with self._changed:
                if not self._has_work():
                    self._busy = False
                    self._changed.wait(AGE)
                if self._gave_up:
                    return
                closing, forced = self._closing, self._urgent or self._wanted > self._passed
                self._urgent = False
                if not self._busy:
                    self._busy, self._moved = True, time.monotonic()
            try:
                self._pass(closing, forced)
            except Exception as error:
                self._error = error if isinstance(error, TensortapError) else StoreWriteError(f"{self._url}: {error}")
                self.check_progress()
                with self._changed:
                    self._changed.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE, max(0.5, self._patience / 4))
                continue
            pause = 0.5
            with self._changed:
                self._passed += 1
                self._busy = False
                self._changed.notify_all()
            if closing:
                return

    def _has_work(self) -> bool:
        return self._closing or self._urgent or self._wanted > self._passed or self._error is not None

    def _pass(self, closing: bool, forced: bool) -> None:
        """Upload finished files; after some time, or if asked, also the rows."""
        rank, writer = self._rank, self._writer
        if closing:
            for _ in rank.upload_rest(closed=True):
                self._moved = time.monotonic()
            remove_spool(self._spool, writer.rank)
            return
        due = forced or writer.waiting_rows >= SEGMENT or time.monotonic() - self._cut >= AGE
        rows = writer.index_bytes()  # before the files of their tensors are completed
        if (due or writer.is_crowded) and not writer.split_files():
            return
        for path in list(rank.shards()):
            writer.release_spooled(rank.upload_shard(path))
        if due:
            if not writer.defers_rows:
                rank.upload_lines()
                rank.upload_rows(rows)
            rank.upload_small(COVERAGE_JSON)
            rank.upload_small(PROGRESS_JSON)
            self._cut = time.monotonic()
            writer.release_spooled(0)


def spool_folder(url: Url, rank: int, chosen: str | os.PathLike[str] | None) -> Path:
    """Return a folder that does not exist yet, for one rank of the run at a URL."""
    base = chosen or os.environ.get("TENSORTAP_SPOOL")
    if not base:
        base = Path(tempfile.gettempdir()) / f"tensortap-spool-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    base = Path(base).absolute()
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreWriteError(
            f"the spool {base} cannot be created: {error.strerror}; choose another with spool="
        ) from error
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", url.name)[:40].strip(".") or "run"
    digest = hashlib.sha256(url.address.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    stem = f"{name}-{digest}-rank_{rank}"
    number = 1
    while (base / (folder := stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return base / folder
