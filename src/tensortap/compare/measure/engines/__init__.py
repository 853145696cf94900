"""Where pairs of tensors are measured: in this process, in worker processes, or on a Ray or Dask cluster.

pool.py           the contract of a pool of workers, and the loop that all pools share
processes.py      worker processes on this machine
ray_workers.py    a Ray cluster
dask_workers.py   a Dask cluster

A pool takes a batch of tasks, which is plain data, and returns its parts. Workers read the tensors themselves. A new
engine is one file with a `WorkerPool`, and its line in `_POOLS`. The numbers are the same bit for bit on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tensortap.compare.measure.device import OnDevice
from tensortap.compare.measure.engine import Engine, Serial, Task
from tensortap.compare.measure.engines.pool import PoolEngine, WorkerPool
from tensortap.compare.options import ComparisonOptions
from tensortap.core.machine import cores
from tensortap.errors import UsageError
from tensortap.kernels.pairs.device import PairDevice

__all__ = ["choose", "engine_of", "process_pool"]

_POOL_FROM = 1 << 30  # bytes below which starting processes costs more than it brings
_MOST_WORKERS = 16


def engine_of(options: ComparisonOptions, opened: ExitStack) -> Engine | None:
    """Return the engine that the options ask for, open until `opened` ends. None leaves the choice to `choose`."""
    if (device := _device_of(options)) is not None:
        return OnDevice(device)
    name, workers = options.engine, options.workers
    if name is None and workers is not None:
        name = "serial" if workers == 1 else "processes"
    if name is None:
        return None
    if name == "serial":
        return Serial()
    return opened.enter_context(PoolEngine(lambda: _POOLS[name](workers, options.address)))


def choose(tasks: Sequence[Task]) -> Engine:
    """Return the engine that is usually fastest: processes for much work on many cores, else this process."""
    if cores() <= 4 or sum(task.nbytes for task in tasks) < _POOL_FROM:
        return Serial()
    return process_pool()


def process_pool(workers: int | None = None) -> PoolEngine:
    """Return an engine of worker processes; None means one for each core."""
    if workers is not None and workers < 1:
        raise UsageError(f"workers must be 1 or more, not {workers}")
    return PoolEngine(lambda: _processes(workers, None))


def _device_of(options: ComparisonOptions) -> PairDevice | None:
    """Return the device that measures whole tensors; None is the CPU."""
    if options.device == "cpu":
        return None
    for name in ("workers", "engine"):
        if getattr(options, name) is not None:
            raise UsageError(f"{name} measure on the CPU: leave them out with device={options.device!r}")
    from tensortap.frameworks import pair_device  # may load torch

    return pair_device(options.device)


# Each imports its library when it is first used.
def _processes(workers: int | None, address: str | None) -> WorkerPool:
    from tensortap.compare.measure.engines.processes import Processes

    return Processes(workers or min(cores(), _MOST_WORKERS))


def _ray(workers: int | None, address: str | None) -> WorkerPool:
    from tensortap.compare.measure.engines.ray_workers import RayWorkers

    return RayWorkers(workers, address)


def _dask(workers: int | None, address: str | None) -> WorkerPool:
    from tensortap.compare.measure.engines.dask_workers import DaskWorkers

    return DaskWorkers(workers, address)


_POOLS: dict[str, Callable[[int | None, str | None], WorkerPool]] = {
    "processes": _processes,
    "ray": _ray,
    "dask": _dask,
}
