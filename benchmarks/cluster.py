"""Engines side by side: cost of a batch, speed over local files, and memory of the process that dispatches.

    python benchmarks/cluster.py [--gb 0.5] [--workers 2] [--engines processes ray dask] [--driver 1 16] [--folder /tmp]

Each engine runs in a process of its own and starts a cluster on this machine. The pairs are tensors of 64 MB that
differ in every element, in the page cache. `--driver` measures so many GB by referring to the same files again and
again, and prints by how much the dispatching process grew.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from tensortap.compare.measure.engine import Span, Task
from tensortap.compare.measure.engines import engine_of
from tensortap.compare.measure.engines.pool import PoolEngine, WorkerPool
from tensortap.compare.options import ComparisonOptions

TENSOR = 64 << 20  # bytes
SHAPE = (TENSOR // 4 // 4096, 4096)
EMPTY = 300
"""Batches without work that show what dispatching costs."""


def write(folder: Path, gigabytes: float) -> int:
    """Write two files of tensors; return how many pairs they have."""
    count = max(int(gigabytes * 1e9 / 2 / TENSOR), 1)
    dice = np.random.default_rng(0)
    array, noise = dice.standard_normal(SHAPE, np.float32), dice.standard_normal(SHAPE, np.float32)
    for name, error in (("reference", 0.0), ("candidate", 1e-2)):
        changed = (array * (1 + np.float32(error) * noise)).tobytes()
        with (folder / name).open("wb") as file:
            for _ in range(count):
                file.write(changed)
    return count


def tasks(folder: Path, count: int) -> list[Task]:
    spans = [
        [Span(str(folder / side), "float32", SHAPE, n * TENSOR, TENSOR) for n in range(count)]
        for side in ("reference", "candidate")
    ]
    return [Task(*both, size=4096.0) for both in zip(*spans, strict=True)]


def open_engine(name: str, workers: int, stack: ExitStack) -> PoolEngine:
    found = engine_of(ComparisonOptions(engine=name, workers=workers), stack)
    assert isinstance(found, PoolEngine)
    return found


def cost_of_batch(pool: WorkerPool) -> float:
    """Return the seconds a batch without work takes, with as many in flight as in a comparison."""
    running: set[Hashable] = set()
    started = time.perf_counter()
    for _ in range(EMPTY):
        running.add(pool.submit([]))
        while len(running) >= 2 * pool.workers:
            running -= _taken(pool, running)
    while running:
        running -= _taken(pool, running)
    return (time.perf_counter() - started) / EMPTY


def _taken(pool: WorkerPool, running: set[Hashable]) -> set[Hashable]:
    done = set(pool.wait(list(running)))
    for each in done:
        pool.outcome(each)
    return done


def measure(name: str, workers: int, folder: Path, count: int, rounds: int, driver: list[float]) -> dict[str, Any]:
    """Measure one engine in this process."""
    work = tasks(folder, count)
    with ExitStack() as stack:
        engine = open_engine(name, workers, stack)
        started = time.perf_counter()
        list(engine.run(work[:1] * workers))  # starts the workers, which load the kernel
        up = time.perf_counter() - started
        assert engine._pool is not None
        a_batch = cost_of_batch(engine._pool)
        taken = []
        for _ in range(rounds):
            started = time.perf_counter()
            assert sum(1 for _ in engine.run(work)) == len(work)
            taken.append(time.perf_counter() - started)
        grown = {}
        for gigabytes in driver:
            before = _peak()
            many = int(gigabytes * 1e9 / 2 / TENSOR)
            assert sum(1 for _ in engine.run(islice(cycle(work), many))) == many
            grown[f"{gigabytes:g}"] = [before, _peak()]
        size = sum(task.nbytes for task in work) / 1e9
        return {"up": up, "a_batch": a_batch, "gb": size, "seconds": statistics.median(taken), "driver": grown}


def _peak() -> int:
    """Return the peak of this process's resident memory. That of `getrusage` includes the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--gb", type=float, default=0.5, help="of both sides together; must fit in the page cache")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--engines", nargs="+", default=["processes", "ray", "dask"])
    arguments.add_argument("--driver", type=float, nargs="*", default=[], help="GB of pairs, to show the memory")
    arguments.add_argument("--folder", type=Path, default=None, help="folder for the files, which are removed again")
    arguments.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        name, folder, count = options.one
        found = measure(name, options.workers, Path(folder), int(count), options.rounds, options.driver)
        print(json.dumps(found))
        return
    folder = Path(tempfile.mkdtemp(prefix="tensortap-bench-", dir=options.folder))
    try:
        count = write(folder, options.gb)
        rate = 0.0
        for name in options.engines:
            command = [sys.executable, __file__, "--one", name, str(folder), str(count)]
            command += ["--workers", str(options.workers), "--rounds", str(options.rounds)]
            command += ["--driver", *map(str, options.driver)] if options.driver else []
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            speed = found["gb"] / found["seconds"]
            rate = rate or speed
            print(
                f"{name:<10} up in {found['up']:5.1f} s   {1000 * found['a_batch']:6.2f} ms a batch   "
                f"{found['gb']:.1f} GB in {found['seconds']:6.2f} s   {speed:5.2f} GB/s   "
                f"{100 * speed / rate:4.0f} % of {options.engines[0]}"
            )
            for gigabytes, (before, after) in found["driver"].items():
                print(
                    f"{'':<10} {gigabytes} GB dispatched: peak {before / 1e6:.0f} MB before, {after / 1e6:.0f} MB after"
                )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
