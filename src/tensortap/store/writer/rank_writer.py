"""RankWriter: the contract between capture and the store. It takes one rank of a run; subclasses hold it somewhere."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.host_copies import DeviceBytes
from tensortap.core.placement import Mesh, Placement
from tensortap.core.records import Coverage, Location, Record
from tensortap.errors import UsageError
from tensortap.store.format import FORMAT, RUN_FORMAT
from tensortap.store.placements import PlacementTable
from tensortap.store.writer.index import IndexWriter, Rows
from tensortap.store.writer.state import WriterState

__all__ = ["RankWriter", "now", "storable_dtype"]

Self = TypeVar("Self", bound="RankWriter")


class RankWriter(ABC):
    """Takes the tensors and records of one rank. All methods may be called from any thread."""

    _index: IndexWriter

    def __init__(self, path: Path, rank: int, world: int, info: Mapping[str, Any]) -> None:
        if not 0 <= rank < world:
            raise UsageError(f"rank must be at least 0 and below world: rank {rank}, world {world}")
        self.path = path
        self.rank = rank
        self._pid = os.getpid()
        self._state = WriterState()
        self._started = now()
        own = {"format": RUN_FORMAT, "version": FORMAT, "world": world, "started": self._started}
        if clash := sorted(own.keys() & info.keys()):
            raise UsageError(f"info must not have {', '.join(clash)}: the store writes that itself.")
        self._info = {**own, **info}
        self._closing = threading.Lock()
        self._closed = False
        self._placements = PlacementTable(self._add_placement)
        self._mesh: Mesh | None = None
        self._renames: Mapping[str, str] = {}

    @abstractmethod
    def put(self, name: str, array: npt.NDArray[Any], *, step: int, ring: bool = False) -> Location | None:
        """Keep an array's bytes; the array may change once this returns. Return None if there is no room for them.

        Bytes of a ring are kept until `release` drops those of their step.
        """

    @abstractmethod
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
        """Keep bytes in C order that a device sends. They may still be in transit when this returns."""

    @abstractmethod
    def release(self, step: int) -> None:
        """Drop the bytes that a ring holds of a step. Readers see its records without tensors."""

    def drop(self, step: int) -> None:
        """Drop the records of a step that a ring has released, with its plain arguments and loop facts."""
        self._check_open()
        self._index.drop(step)

    @abstractmethod
    def called(self, step: int, micro: int, module: str, call: int, arguments: Mapping[str, Any]) -> None:
        """Keep the plain arguments of a call, as `tensortap.core.arguments` writes them.

        The caller reports them before the call's records, and only if they differ from the module's previous call.
        """

    @abstractmethod
    def loop_fact(self, step: int, fact: str, of: str, value: Mapping[str, Any]) -> None:
        """Keep a loop fact; `tensortap.store.loop` lists them, and the form of their values.

        The caller reports it before later records, and only if it differs from the last with the same `fact` and `of`.
        """

    @abstractmethod
    def end_step(self, step: int) -> None:
        """Complete the step, without waiting until everything is stored."""

    @abstractmethod
    def coverage(self, rows: Sequence[Coverage], notices: Sequence[str] = ()) -> None:
        """Store the coverage of each module, in place of what was stored before."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return statistics of the stored data, and the time that the caller waited for it."""

    @abstractmethod
    def close(self, status: str = "finished", reason: str = "") -> None:
        """Store all waiting data and end all threads. A second call does nothing."""

    def delete(self) -> None:
        """Delete what was stored, after `close`. A run in memory ends with its writer."""
        return

    @abstractmethod
    def _barrier(self) -> bool:
        """Wait until all bytes that were put so far are stored; False if they cannot be."""

    def interrupt(self) -> list[str]:
        """Stop the work that `close` waits for, because the user does not want to wait; return lines about the rest."""
        return []

    def take_notices(self) -> list[str]:
        """Return notices about storing since the last call, such as a limit that was reached."""
        return []

    def append(self, record: Record) -> None:
        """Queue an index row. It goes out with others, after the bytes it refers to."""
        self._check_open()
        if record.placement is not None:
            self._placements.number(record.placement)
        self._index.append(record)

    def number_of(self, placement: Placement) -> int:
        """Return the number of a placement, for the column `placement` of `append_rows`."""
        self._check_open()
        return self._placements.number(placement)

    def arrange(self, mesh: Mesh | None, renames: Mapping[str, str]) -> None:
        """Keep the mesh of this process, and the global names of its modules by their local names where they differ."""
        self._check_open()
        self._mesh, self._renames = mesh, dict(renames)

    def _add_placement(self, placement: Placement) -> None:
        """Store a new placement, before any row that names it."""
        return

    def append_rows(self, rows: Rows) -> None:
        """Queue many rows whose values are not known yet. The index reads their columns when they go out."""
        self._check_open()
        self._index.append_rows(rows)

    def progress(self, value: Mapping[str, Any]) -> None:
        """Write the progress of the run for `tensortap watch`. A run in memory writes none."""
        return

    @property
    def appended(self) -> int:
        """Number of rows so far."""
        return self._index.appended

    def wait_for_rows(self, count: int) -> None:
        """Wait until this number of rows is written. The end of a later step must have sent them out."""
        self._index.wait_for(count)

    def flush(self) -> None:
        """Wait until all data that was put and appended so far is stored."""
        self._check_open()
        self._state.check()
        self._barrier()
        self._index.flush()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._state.reported = True  # the caller's own error is raised, not this one
        self.close("failed", f"{type(error).__name__}: {error}")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"the writer of {self.path} is closed.")
        if os.getpid() != self._pid:  # threads and locks do not survive a fork
            raise UsageError(f"the writer of {self.path} belongs to process {self._pid}: open one in each process.")


def storable_dtype(name: str, array: npt.NDArray[Any]) -> str:
    """Return the name of the array's dtype; raise UsageError if the store has none for it."""
    try:
        return dtypes.name_of(array.dtype)
    except KeyError:
        raise UsageError(
            f"{name}: dtype {array.dtype} cannot be stored; known are {', '.join(dtypes.NAMES)}."
        ) from None


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
