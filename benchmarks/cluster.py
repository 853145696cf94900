"""Engines side by side: cost of a batch, speed over local files, and memory of the process that dispatches.

    python benchmarks/cluster.py [--gb 0.5] [--workers 2] [--engines processes ray dask] [--driver 1 16] [--folder /tmp]

Each engine runs in a process of its own and starts a cluster on this machine. The pairs differ in every element, so
that no digest settles them, and are in the page cache: tensors of 64 MB, then the same bytes as tensors of 1 MB. Once
all workers are up, the engines take turns, round by round, so that other load on the machine affects them alike.
`--driver` measures so many GB by referring to the same files again and again, and prints by how much the dispatching
process grew.
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

LARGE, SMALL = 64 << 20, 1 << 20
"""Bytes of a tensor in the two cases."""
WIDTH = 4096
EMPTY = 300
"""Batches without work that show what dispatching costs."""


def write(folder: Path, gigabytes: float) -> int:
    """Write two files of tensors; return how many pairs of large ones they have."""
    count = max(int(gigabytes * 1e9 / 2 / LARGE), 1)
    dice = np.random.default_rng(0)
    shape = (LARGE // 4 // WIDTH, WIDTH)
    array, noise = dice.standard_normal(shape, np.float32), dice.standard_normal(shape, np.float32)
    for name, error in (("reference", 0.0), ("candidate", 1e-2)):
        changed = (array * (1 + np.float32(error) * noise)).tobytes()
        with (folder / name).open("wb") as file:
            for _ in range(count):
                file.write(changed)
    return count


def tasks(folder: Path, count: int, tensor: int = LARGE) -> list[Task]:
    """Return the pairs of the files that `write` wrote, as tensors of so many bytes."""
    shape = (tensor // 4 // WIDTH, WIDTH)
    spans = [
        [Span(str(folder / side), "float32", shape, at, tensor) for at in range(0, count * LARGE, tensor)]
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


def serve(name: str, workers: int, folder: Path, count: int) -> None:
    """Open one engine in this process, and answer the requests of `Child` until there are no more."""
    work = {tensor: tasks(folder, count, tensor) for tensor in (LARGE, SMALL)}
    with ExitStack() as stack:
        engine = open_engine(name, workers, stack)
        started = time.perf_counter()
        list(engine.run(work[LARGE][:1] * workers))  # starts the workers, which load the kernel
        up = time.perf_counter() - started
        assert engine._pool is not None
        answer({"up": up, "a_batch": cost_of_batch(engine._pool)})
        for line in sys.stdin:
            request = json.loads(line)
            if "tensor" in request:
                chosen = work[request["tensor"]]
                started = time.perf_counter()
                assert sum(1 for _ in engine.run(chosen)) == len(chosen)
                answer(time.perf_counter() - started)
            else:
                before, many = _peak(), int(request["driver"] * 1e9 / 2 / LARGE)
                assert sum(1 for _ in engine.run(list(islice(cycle(work[LARGE]), many)))) == many
                answer([before, _peak()])


def answer(found: Any) -> None:
    print(json.dumps(found), flush=True)


def _peak() -> int:
    """Return the peak of this process's resident memory. That of `getrusage` includes the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


class Child:
    """A process that runs one engine."""

    def __init__(self, name: str, workers: int, folder: Path, count: int) -> None:
        self.name = name
        command = [sys.executable, __file__, "--one", name, str(folder), str(count), "--workers", str(workers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.started: dict[str, float] = self._answer()

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("{", "[")) or line[:1].isdigit():  # clusters print lines of their own
                return json.loads(line)
        raise SystemExit(f"the engine {self.name} ended with exit code {self._process.wait()}")


def compare_engines(names: list[str], workers: int, folder: Path, count: int, rounds: int, driver: list[float]) -> None:
    with ExitStack() as stack:
        engines = []
        for name in names:
            engines.append(Child(name, workers, folder, count))
            stack.callback(engines[-1].close)
            started = engines[-1].started
            print(f"{name:<10} up in {started['up']:5.1f} s   {1000 * started['a_batch']:6.2f} ms a batch", flush=True)
        gigabytes = count * LARGE * 2 / 1e9
        for tensor in (LARGE, SMALL):
            taken: list[list[float]] = []
            for number in range(rounds + 1):
                turn = [engine.ask(tensor=tensor) for engine in engines]
                if number:  # the first round maps the files
                    taken.append(turn)
            print(f"\n{gigabytes:.1f} GB as tensors of {tensor >> 20} MB, medians of {rounds} rounds in turns")
            for engine, seconds in zip(engines, zip(*taken, strict=True), strict=True):
                median = statistics.median(seconds)
                relative = statistics.median(turn[0] / second for turn, second in zip(taken, seconds, strict=True))
                print(
                    f"{engine.name:<10} {median:6.3f} s   {gigabytes / median:5.2f} GB/s   "
                    f"{100 * relative:4.0f} % of {names[0]}",
                    flush=True,
                )
        print(end="\n" if driver else "")
        for engine in engines:
            for each in driver:
                before, after = (nbytes / 1e6 for nbytes in engine.ask(driver=each))
                print(f"{engine.name:<10} {each:g} GB dispatched: peak {before:.0f} MB before, {after:.0f} MB after")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--gb", type=float, default=0.5, help="of both sides together; must fit in the page cache")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--engines", nargs="+", default=["processes", "ray", "dask"])
    arguments.add_argument("--driver", type=float, nargs="*", default=[], help="GB of pairs, to show the memory")
    arguments.add_argument("--folder", type=Path, default=None, help="folder for the files, which are removed again")
    arguments.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        name, path, pairs = options.one
        serve(name, options.workers, Path(path), int(pairs))
        return
    folder = Path(tempfile.mkdtemp(prefix="tensortap-bench-", dir=options.folder))
    try:
        count = write(folder, options.gb)
        compare_engines(options.engines, options.workers, folder, count, options.rounds, options.driver)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
