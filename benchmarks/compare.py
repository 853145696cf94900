"""Cost of measuring the difference of two runs, with all bytes in the page cache.

    python benchmarks/compare.py [--gb 4] [--rounds 5] [--folder /tmp] [--row 4096] [--device cuda]

The runs hold tensors that differ slightly in every element, the worst case. The ways are our pass, NumPy's dot,
norms, mean, std and var one after the other, a loop that only reads the bytes and, with --device, the pass on the
GPU. All ways take turns over the same files, so that other load disturbs them equally. Medians, ratios and the growth
of the process's peak memory are printed.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

import tensortap
from tensortap.compare.measure.device import OnDevice
from tensortap.compare.measure.engine import Serial, Span, Task
from tensortap.core import dtypes
from tensortap.core.machine import cores
from tensortap.core.records import Key, Record, Summary
from tensortap.frameworks import pair_device
from tensortap.kernels import summarize
from tensortap.kernels.pairs.device import PairDevice
from tensortap.kernels.pairs.sketches import sketch_differences
from tensortap.store import RunWriter, open_run

TENSOR = 64 << 20  # bytes
Array = npt.NDArray[Any]


def write(path: Path, dtype: str, count: int, error: float, row: int) -> None:
    """Write a run of `count` tensors; runs with different errors differ by these alone."""
    n = TENSOR // dtypes.numpy_dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    values, noise = rng.standard_normal(n, np.float32), rng.standard_normal(n, np.float32)
    array = (values * (1 + np.float32(error) * noise)).astype(dtypes.numpy_dtype(dtype))
    array = array[: n // row * row].reshape(-1, row)
    summary = summarize(array)
    with RunWriter(path, info={}) as writer:
        for i in range(count):
            key = Key(0, 0, "forward", f"layers.{i}", 0, "output", "0")
            where = writer.put(str(key), array, step=0)
            writer.append(Record(key, 0, i, "Linear", dtype, array.shape, i, summary, where))


def spans(path: Path) -> list[Span]:
    with open_run(path) as run:
        return [
            Span(str(path / "rank_0" / record.location.file), record.dtype, record.shape, *record.location[1:])
            for record in run.records()
            if record.location is not None
        ]


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def read(words: Array) -> Any:
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


def mapped(span: Span, dtype: Any) -> Array:
    """Return a new map, so that each way pays for its own page faults."""
    count = span.nbytes // np.dtype(dtype).itemsize
    return np.memmap(span.name, dtype, "r", span.offset, (count,))


def only_read(tasks: list[Task]) -> None:
    with ThreadPoolExecutor(cores()) as threads:
        every = [span for task in tasks for span in (task.reference, task.candidate)]
        list(threads.map(lambda span: read(mapped(span, np.uint64)), every))


def ours(tasks: list[Task]) -> None:
    for _, measure in Serial().run(tasks):
        assert not measure.difference.equal


def on(device: PairDevice, tasks: list[Task]) -> None:
    for _, measure in OnDevice(device).run(tasks):
        assert not measure.difference.equal


def with_numpy(tasks: list[Task]) -> None:
    """Compute the usual NumPy measures: sums in float32, without positions, counts or ULPs."""
    for task in tasks:
        r, c = (mapped(span, dtypes.numpy_dtype(span.dtype)) for span in (task.reference, task.candidate))
        if task.reference.dtype != "float32":
            r, c = r.astype(np.float32), c.astype(np.float32)
        found = [float(np.dot(r, c))]
        for side in (r, c):
            found += [float(f(side)) for f in (np.linalg.norm, np.mean, np.std, np.var)]
        assert np.isfinite(found).all()


class Memory:
    """Growth of the process's resident memory at its peak, mapped files included. Linux only."""

    def __enter__(self) -> Memory:
        self._before, self.peak = self._now(), 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.peak = max(self.peak, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_turn(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each way. The first round does not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if round_:
                taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in taken.items()}


def measure_pairs(folder: Path, dtype: str, gigabytes: float, rounds: int, row: int, device: PairDevice | None) -> None:
    count = max(int(gigabytes * 1e9 / 2 / TENSOR), 1)
    for name, error in (("reference", 0.0), ("candidate", 1e-2)):
        write(folder / name, dtype, count, error, row)
    both = zip(spans(folder / "reference"), spans(folder / "candidate"), strict=True)
    tasks = [Task(r, c, size=math.sqrt(math.prod(r.shape))) for r, c in both]  # the l2 of standard normal numbers
    size = sum(task.nbytes for task in tasks) / 1e9
    only_read(tasks)  # the first touch of a cached page is far slower than later ones
    ours(tasks[:1])
    with Memory() as memory:
        ours(tasks)
    ways: dict[str, Callable[[], None]] = {"read": lambda: only_read(tasks), "ours": lambda: ours(tasks)}
    if device is not None:
        ways["device"] = lambda: on(device, tasks)
    taken = in_turn(ways | {"numpy": lambda: with_numpy(tasks)}, rounds)
    print(
        f"{dtype}: {size:.1f} GB in {len(tasks)} pairs of {TENSOR >> 20} MB, rows of {row}, {cores()} cores, "
        f"median of {rounds}"
    )
    for name, seconds in taken.items():
        print(f"  {name:<6} {seconds:8.3f} s  {size / seconds:7.2f} GB/s")
    print(f"  ours against NumPy      {taken['numpy'] / taken['ours']:6.1f} x")
    print(f"  ours against reading    {100 * taken['read'] / taken['ours']:6.0f} %")
    if device is not None:
        print(f"  device against ours     {taken['ours'] / taken['device']:6.2f} x")
        print(f"  device against reading  {100 * taken['read'] / taken['device']:6.0f} %")
    print(f"  memory at its highest   {memory.peak / 1e6:6.0f} MB above the start")
    for name in ("reference", "candidate"):
        shutil.rmtree(folder / name)


def measure_sketches(rounds: int) -> None:
    """Time the distances of 100,000 pairs of sketches alone."""
    n = 100_000
    rng = np.random.default_rng(0)
    r = rng.standard_normal((n, 256), np.float32)
    c, rows = r * np.float32(1.01), np.arange(n)
    taken = in_turn({"sketches": lambda: float(sketch_differences(r, rows, c, rows)[0])}, rounds)  # type: ignore[dict-item]
    print(f"sketches: {n} pairs in {1000 * taken['sketches']:.0f} ms")


def measure_summaries(folder: Path, rounds: int, records: int = 100_000) -> None:
    """Time the comparison of two runs of summaries, and loading their two indexes alone."""
    paths = [folder / name for name in ("reference", "candidate")]
    for path, off in zip(paths, (0.0, 1e-6), strict=True):
        write_summaries(path, records, off)

    def load() -> None:
        for path in paths:
            run = tensortap.open(path)
            for name in run.index(0).column_names:
                run.index(0).column(name).combine_chunks()
            run.sketches(0)

    ways = {"load": load, "compare": lambda: str(tensortap.compare(*paths))}
    taken = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if turn:
                taken[name].append(time.perf_counter() - started)
    ratio = statistics.median(c / b for c, b in zip(taken["compare"], taken["load"], strict=True))
    print(
        f"summaries: two runs of {records:,} records loaded in {statistics.median(taken['load']):.3f} s, "
        f"compared in {statistics.median(taken['compare']):.3f} s: {ratio:.2f} times"
    )


def write_summaries(path: Path, records: int, off: float) -> None:
    """Write a run of a 100-layer model with every tensor slightly off; inputs are the previous outputs."""
    dice = np.random.default_rng(0)
    sketches = dice.standard_normal((512, 256)).astype(np.float32)
    noise = np.random.default_rng(1).standard_normal((512, 256)).astype(np.float32)
    sketches += np.float32(off) * noise
    with RunWriter(path, info={"framework": "none", "config": {}}) as writer:
        seq = tensor = 0
        for step in range(records // 2000):
            for block in range(100):
                for leaf in range(5):
                    for kind, phase in (
                        ("input", "forward"),
                        ("output", "forward"),
                        ("grad_output", "backward"),
                        ("param_grad", "backward"),
                    ):
                        fresh = kind != "input" or not leaf
                        tensor += fresh
                        sketch = sketches[tensor % 512]
                        summary = Summary(
                            2**20, 0, 0, 0, 0, 0, -4.0, 4.0, 0.0, 1.0, 8e5, 1000.0, tensor + int(off * 1e9), sketch
                        )
                        key = Key(step, 0, phase, f"layers.{block}.part{leaf}", 0, kind, "0")
                        writer.append(Record(key, 0, seq, "Linear", "float32", (1024, 1024), tensor, summary))
                        seq += 1
            writer.end_step(step)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--gb", type=float, default=4.0, help="of both runs together; must fit in the page cache")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--row", type=int, default=4096, help="elements in a row, along the last dimension")
    arguments.add_argument("--device", default=None, help="cuda: measure on the GPU, too")
    arguments.add_argument("--only-summaries", action="store_true")
    arguments.add_argument("--folder", type=Path, default=None, help="folder for the runs, which are removed again")
    options = arguments.parse_args()
    device = None if options.device is None else pair_device(options.device)
    folder = Path(tempfile.mkdtemp(prefix="tensortap-bench-", dir=options.folder))
    try:
        for dtype in () if options.only_summaries else ("float32", "bfloat16"):
            measure_pairs(folder, dtype, options.gb, options.rounds, options.row, device)
        measure_sketches(options.rounds)
        measure_summaries(folder, options.rounds)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
