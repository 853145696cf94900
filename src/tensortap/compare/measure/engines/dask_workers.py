"""Workers of a Dask cluster: the one this program already uses, the one at an address, or a small one started here."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Hashable
from typing import Any

from tensortap.compare.measure.engine import Batch
from tensortap.compare.measure.engines.pool import Outcome, WorkerDied, WorkerPool, measure_batch
from tensortap.compare.measure.engines.processes import without_main
from tensortap.core.machine import cores
from tensortap.errors import MissingDependency, UsageError

__all__ = ["DaskWorkers"]

_SECONDS = 10
"""To wait for a scheduler."""


class DaskWorkers(WorkerPool):
    """Each batch is a Dask task. Dask itself runs tasks of lost workers again."""

    def __init__(self, workers: int | None, address: str | None) -> None:
        self._dask = _distributed()
        self._cluster: Any = None
        self._client = self._connect(workers, address)
        self.workers = workers or max(1, sum(self._client.nthreads().values()))

    def _connect(self, workers: int | None, address: str | None) -> Any:
        self._started = True
        if address not in (None, "auto"):
            return self._open(address)
        try:
            self._started = False
            return self._dask.client.default_client()
        except ValueError:
            self._started = True
        if address == "auto":
            raise UsageError("address='auto': this process has no Dask client; give the address of the scheduler")
        with without_main():  # a script without an `if __name__ == "__main__"` would run again in each worker
            self._cluster = self._dask.LocalCluster(
                n_workers=workers or cores(),
                threads_per_worker=1,
                dashboard_address=None,
                silence_logs=logging.CRITICAL,
            )
        return self._open(self._cluster)

    def _open(self, where: Any) -> Any:
        try:
            return self._dask.Client(where, timeout=_SECONDS, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"address={where!r}: there is no Dask scheduler to connect to; "
                "start one with `dask scheduler`, or leave the address out"
            ) from error

    def submit(self, batch: Batch) -> Hashable:
        future: Hashable = self._client.submit(measure_batch, batch, pure=False)
        return future

    def wait(self, running: Collection[Hashable]) -> Collection[Hashable]:
        with self._client.as_current():
            found: Collection[Hashable] = self._dask.wait(list(running), return_when="FIRST_COMPLETED").done
        return found

    def outcome(self, finished: Hashable) -> Outcome:
        future: Any = finished
        try:
            outcome: Outcome = future.result()
        except (self._dask.KilledWorker, self._dask.CancelledError) as error:
            raise WorkerDied(str(error).splitlines()[0].rstrip(".")) from error
        finally:
            future.release()
        return outcome

    def cancel(self, running: Collection[Hashable]) -> None:
        self._client.cancel(list(running), force=True)

    def close(self) -> None:
        if self._started:
            self._client.close()
        if self._cluster is not None:
            self._cluster.close()


def _distributed() -> Any:
    try:
        return importlib.import_module("distributed")
    except ImportError as error:
        raise MissingDependency("engine='dask' needs Dask: pip install 'tensortap[dask]'") from error
