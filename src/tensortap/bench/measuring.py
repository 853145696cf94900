"""All figures of one run, as plain data for reports and JSON.

machine   device, its name, cores, versions
model     name, parameters, leaf modules, batch, length, dtype
tapped    records of a step, distinct tensors among them, and their bytes
limits    bytes per second (None: not measured), files of page_cache_write_many, seconds of device_launch
ways      plain, summary, tensors, np.save, each with: seconds per step until the last byte is written; the same without
          the wait at the end (each); the host's seconds per step (launching); medians of their ratios to plain within a
          round; rounds and steps in a row; memory over plain and peaks; the tap's stats over the last block; the limit
kernel    the summary kernel alone, see bench/kernel.py; None without one
leak      growth of host and device memory from the first steps to the last
left_out  descriptions of parts that were skipped for lack of time or space
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import tensortap
from tensortap.bench import limits
from tensortap.bench.kernel import summary_kernel_speed
from tensortap.bench.memory import available, device_held, resident
from tensortap.bench.model import size_of
from tensortap.bench.numpy_saving import TIME_LIMIT, save_in_hooks
from tensortap.bench.options import BenchOptions
from tensortap.bench.steps import KINDS, TimedBlock, plain, tapped
from tensortap.bench.trainer import Trainer, device_of, is_leaf
from tensortap.bench.verdict import floors, limit
from tensortap.bench.writing import BLOCK, direct_write, page_cache_write, warm_page_cache
from tensortap.core import dtypes
from tensortap.core.machine import cores
from tensortap.errors import UsageError

__all__ = ["measured"]

_SPARE = 1 << 30
_BUFFERS = 4 << 30
"""Maximum host memory of a tap for tensors of a device."""
_LONGEST = 6.0
"""Maximum seconds of a block: a very slow way gets fewer steps in a row."""


def measured(options: BenchOptions, on_progress: Callable[[str, float], None]) -> dict[str, Any]:
    """See `bench.measure`."""
    device = device_of(options.device)
    name, size = size_of(options.model, device)
    with _scratch(options.out) as folder:
        on_progress("building the model", 0.0)
        trainer = Trainer(size, device)
        bench = _Bench(options, trainer, folder, on_progress)
        return {
            "machine": _machine(device),
            "model": {"name": name, "parameters": trainer.parameters, "leaves": trainer.leaves} | asdict(size),
        } | bench.figures()


class _Bench:
    """One run of the benchmark."""

    def __init__(
        self, options: BenchOptions, trainer: Trainer, folder: Path, on_progress: Callable[[str, float], None]
    ) -> None:
        self._options = options
        self._trainer = trainer
        self._folder = folder
        self._on_progress = on_progress
        self._started = time.perf_counter()
        self._left_out: list[str] = []
        self._parts = options.rounds + 3 + ("tensors" in options.keep) + options.np_save + bool(options.leak_steps)
        self._parts_done = 0

    def figures(self) -> dict[str, Any]:
        self._announce("counting the tensors of a step")
        content = self._content()
        fitting = self._fitting_steps(content["bytes"]) if "tensors" in self._options.keep else 0
        if fitting:
            self._warm(content["bytes"], fitting)
        self._announce("measuring the machine")
        found = self._limits(content["bytes"])
        kernel = summary_kernel_speed() if self._options.kernel and self._trainer.device == "cuda" else None
        blocks = self._rounds(fitting)
        leak = self._leak()
        if self._options.np_save:
            blocks |= self._np_save()
        return {
            "tapped": content,
            "limits": found,
            "ways": self._ways(blocks, content, found),
            "kernel": kernel,
            "leak": leak,
            "left_out": self._left_out,
            "seconds": time.perf_counter() - self._started,
        }

    def _content(self) -> dict[str, int]:
        """Count records, tensors and bytes of one step; summaries see the same tensors as whole ones."""
        folder = self._folder / "content"
        with tensortap.capture(self._trainer.model, folder, kinds=KINDS, modules=is_leaf) as tap:
            self._trainer.step()
            tap.step()
        records = list(tensortap.open(folder))
        shutil.rmtree(folder)
        once = {r.tensor: r.summary.elements * dtypes.numpy_dtype(r.dtype).itemsize for r in records}
        return {"records": len(records), "tensors": len(once), "bytes": sum(once.values())}

    def _warm(self, nbytes: int, steps: int) -> None:
        """Touch the memory that a block of whole tensors needs: timed steps, one that is still written, and buffers.

        A quarter of the free memory stays untouched.
        """
        needed = (1 + steps) * nbytes + (_BUFFERS if self._trainer.device == "cuda" else 0)
        size = min(needed, self._room(), available() * 3 // 4)
        self._announce(f"writing and removing {size / 1e9:.1f} GB to warm up the page cache")
        warm_page_cache(self._folder, size)

    def _room(self) -> int:
        return max(0, shutil.disk_usage(self._folder).free - _SPARE)

    def _limits(self, nbytes: int) -> dict[str, Any]:
        cuda = self._trainer.device == "cuda"
        size = min(max(4 * nbytes, 64 << 20), 8 << 30, self._room() // 2)
        files = max(2, min(cores(), size // BLOCK))
        return {
            "device_read": limits.device_read() if cuda else None,
            "device_to_host": limits.device_to_host() if cuda else None,
            "device_launch": limits.device_launch() if cuda else None,
            "memory_read": limits.memory_read(),
            "page_cache_write": page_cache_write(self._folder, size // 2, 1),
            "page_cache_write_many": page_cache_write(self._folder, size, files),
            "files": files,
            "direct_write": direct_write(self._folder, size // 2),
        }

    def _rounds(self, fitting: int) -> dict[str, list[TimedBlock]]:
        """Run all ways in turns, so that other load disturbs them equally, after one step of each to warm up."""
        options, trainer, folder = self._options, self._trainer, self._folder
        ways: dict[str, Callable[[int], TimedBlock]] = {"plain": lambda steps: plain(trainer, steps)}
        most = {"plain": options.steps, "summary": options.steps}
        if "summary" in options.keep:
            ways["summary"] = lambda steps: tapped(trainer, steps, folder / "run", "summary")
        if "tensors" in options.keep:
            ways["tensors"] = lambda steps: tapped(trainer, steps, folder / "run", "tensors")
            most["tensors"] = fitting
        self._announce("warming up")
        paces = {name: way(1).seconds for name, way in ways.items()}
        steps = {name: max(1, min(most[name], int(_LONGEST / pace))) for name, pace in paces.items()}
        blocks: dict[str, list[TimedBlock]] = {name: [] for name in ways}
        for turn in range(options.rounds):
            if turn and self._is_late():
                self._left_out.append(f"{options.rounds - turn} of {options.rounds} rounds, for lack of time")
                break
            self._announce(f"round {turn + 1} of {options.rounds}")
            for name, way in ways.items():
                blocks[name].append(way(steps[name]))
        return blocks

    def _fitting_steps(self, nbytes: int) -> int:
        """Return the number of steps whose tensors fit on the disk, up to the requested number."""
        free = self._room()
        steps = min(self._options.tensor_steps, int(free / (1.05 * nbytes)))
        if steps < 1:
            raise UsageError(
                f"{self._folder.parent} has {free / 1e9:.1f} GB of free space, and the tensors of one step take "
                f"{nbytes / 1e9:.1f} GB: choose another place with --out, or measure with --keep summary"
            )
        return steps

    def _leak(self) -> dict[str, Any] | None:
        wanted = self._options.leak_steps
        if not wanted:
            return None
        self._announce(f"{wanted} steps with summaries")
        trainer, settled, done = self._trainer, max(1, min(10, wanted // 10)), 0
        folder = self._folder / "leak"
        with tensortap.capture(trainer.model, folder, kinds=KINDS, modules=is_leaf) as tap:
            before = self._held()
            while done < wanted and (done <= settled or not self._is_late(1.25)):
                trainer.step()
                tap.step()
                done += 1
                if done == settled:
                    tap.flush()
                    before = self._held()
            tap.flush()
            after = self._held()
        shutil.rmtree(folder)
        if done < wanted:
            self._left_out.append(f"{wanted - done} of {wanted} steps of the leak, for lack of time")
        grown = {name: after[name] - before[name] for name in after}
        return {"steps": done, "from_step": settled} | grown

    def _np_save(self) -> dict[str, list[TimedBlock]]:
        """Measure np.save in hooks. It is slow but has a time limit, so it may begin later than the rest."""
        if self._is_late(1.5):
            self._left_out.append("np.save in hooks, for lack of time")
            return {}
        self._announce(f"np.save in hooks, {TIME_LIMIT:.0f} s at most")
        block = save_in_hooks(self._trainer, self._folder / "np_save")
        done, all_of_it = block.stats["bytes"] / 1e9, block.stats["bytes_of_all"] / 1e9
        if done < all_of_it:
            self._left_out.append(
                f"a part of np.save in hooks: its figures are projected from {done:.1f} of {all_of_it:.1f} GB"
            )
        return {"np.save": [block]}

    def _held(self) -> dict[str, int]:
        self._trainer.synchronize()
        allocated = torch.cuda.memory_allocated() if self._trainer.device == "cuda" else 0
        return {"host": resident(), "device_allocated": allocated, "device_used": device_held(self._trainer.device)}

    def _ways(
        self, blocks: dict[str, list[TimedBlock]], content: dict[str, int], found: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        base = blocks["plain"]
        ways: dict[str, dict[str, Any]] = {}
        for name, each in blocks.items():
            way = _way(each, base)
            if name == "tensors":
                way["bytes_per_second"] = content["bytes"] / way["seconds"]
            elif name == "np.save":
                way["bytes_per_second"] = way["stats"]["bytes_of_all"] / way["seconds"]
            if name in self._options.keep:
                slowest = floors(name, self._trainer.device, content["bytes"], content["tensors"], found)[0]
                alone = name == "summary" and self._trainer.device == "cuda"  # whole tensors may wait for memory
                launching = way["launching"] if alone else None
                way["limit"] = limit(way["seconds"], ways["plain"]["seconds"], slowest, launching)
            ways[name] = way
        return ways

    def _is_late(self, bound: float = 1.0) -> bool:
        return time.perf_counter() - self._started > bound * self._options.seconds

    def _announce(self, what: str) -> None:
        self._on_progress(what, self._parts_done / self._parts)
        self._parts_done += 1


def _way(blocks: Sequence[TimedBlock], base: Sequence[TimedBlock]) -> dict[str, Any]:
    """Return medians over the rounds; ratios are taken within a round if each has a plain block."""
    others = base if len(blocks) == len(base) else [_middle(base)] * len(blocks)
    paired = list(zip(blocks, others, strict=True))
    last = blocks[-1]
    return {
        "seconds": statistics.median(block.seconds for block in blocks),
        "each": statistics.median(block.each for block in blocks),
        "launching": statistics.median(block.launching for block in blocks),
        "ratio": statistics.median(block.seconds / other.seconds for block, other in paired),
        "ratio_each": statistics.median(block.each / other.each for block, other in paired),
        "ratio_waited": _median([b.waited / other.waited for b, other in paired if b.waited and other.waited]),
        "rounds": len(blocks),
        "steps": last.steps,
        "memory": {
            name: int(statistics.median(asdict(b.memory)[name] - asdict(other.memory)[name] for b, other in paired))
            for name in asdict(last.memory)
        },
        "memory_peak": asdict(last.memory),
        "stats": dict(last.stats),
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _middle(blocks: Sequence[TimedBlock]) -> TimedBlock:
    return sorted(blocks, key=lambda block: block.seconds)[len(blocks) // 2]


def _machine(device: str) -> dict[str, Any]:
    return {
        "device": device,
        "name": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "cores": cores(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tensortap": tensortap.__version__,
    }


@contextmanager
def _scratch(out: Path | None) -> Iterator[Path]:
    """Provide a temporary folder and remove it afterwards."""
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="tensortap-bench-", dir=out))
    except OSError as error:
        place = f"--out {out}" if out is not None else "the folder for temporary files"
        raise UsageError(f"{place}: {error.strerror or error}; choose a writable folder with --out") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
