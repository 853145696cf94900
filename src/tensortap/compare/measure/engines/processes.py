"""Worker processes on this machine, which load neither a framework nor the main script."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Collection, Hashable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any

from tensortap.compare.measure.engine import Batch
from tensortap.compare.measure.engines.pool import Outcome, WorkerDied, WorkerPool, measure_batch

__all__ = ["Processes", "without_main"]


class Processes(WorkerPool):
    """A pool of processes. If one of them dies, Python gives up the whole pool: the next batch starts another."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, batch: Batch) -> Hashable:
        try:
            return self._open().submit(measure_batch, batch)
        except BrokenProcessPool:
            self.close()
            return self._open().submit(measure_batch, batch)

    def wait(self, running: Collection[Hashable]) -> Collection[Hashable]:
        futures: Any = running
        return wait(futures, return_when=FIRST_COMPLETED).done

    def outcome(self, finished: Hashable) -> Outcome:
        assert isinstance(finished, Future)
        try:
            outcome: Outcome = finished.result()
        except BrokenProcessPool as error:
            raise WorkerDied("a worker process ended abruptly") from error
        return outcome

    def cancel(self, running: Collection[Hashable]) -> None:
        for each in running:
            assert isinstance(each, Future)
            each.cancel()

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _open(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.workers, mp_context=_Context())
        return self._pool


class _Worker(SpawnProcess):
    """A process that does not run the main script: without an `if __name__ == "__main__"` it would run twice."""

    def start(self) -> None:
        with without_main(), _interrupts_blocked():
            super().start()


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the main script from processes that are started inside."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in a process started inside: only the parent reports the interruption, and ends the process."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process inherits the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Context(SpawnContext):
    Process = _Worker


_starting = threading.Lock()
