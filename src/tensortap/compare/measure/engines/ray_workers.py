"""Workers of a Ray cluster: the one this program already uses, the one at an address, or a small one started here."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Hashable
from typing import Any

from tensortap.compare.measure.engine import Batch
from tensortap.compare.measure.engines.pool import Outcome, WorkerDied, WorkerPool, measure_batch
from tensortap.errors import MissingDependency, UsageError

__all__ = ["RayWorkers"]


class RayWorkers(WorkerPool):
    """Each batch is a Ray task of one CPU. Ray itself runs tasks of lost workers again."""

    def __init__(self, workers: int | None, address: str | None) -> None:
        self._ray = _ray()
        self._started = not self._ray.is_initialized()
        if self._started:
            self._start(workers, address)
        elif address not in (None, "auto"):
            raise UsageError(f"address={address!r}: this process is connected to a Ray cluster already; leave it out")
        self.workers = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._task = self._ray.remote(num_cpus=1, max_retries=3)(measure_batch)

    def _start(self, workers: int | None, address: str | None) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            options |= {"num_cpus": workers, "include_dashboard": False}
        else:
            options["address"] = address
        try:
            self._ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"address={address!r}: there is no Ray cluster to connect to ({_line(error)}); "
                "start one with `ray start --head`, or leave the address out"
            ) from error

    def submit(self, batch: Batch) -> Hashable:
        reference: Hashable = self._task.remote(batch)
        return reference

    def wait(self, running: Collection[Hashable]) -> Collection[Hashable]:
        found: list[Hashable] = self._ray.wait(list(running), num_returns=1)[0]
        return found

    def outcome(self, finished: Hashable) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(finished)
        except self._ray.exceptions.RayTaskError:
            raise  # the task itself failed
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(_line(error)) from error
        return outcome

    def cancel(self, running: Collection[Hashable]) -> None:
        for each in running:
            self._ray.cancel(each)

    def close(self) -> None:
        if self._started:
            self._ray.shutdown()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingDependency("engine='ray' needs Ray: pip install 'tensortap[ray]'") from error


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
