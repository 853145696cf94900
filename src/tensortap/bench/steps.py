"""Blocks of steps, plain and tapped, with their times and memory.

A block begins with a few untimed steps, in which buffers are allocated. The clock then runs from an idle device until
the last byte of the last step is with the operating system: deferred work is included.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import tensortap
from tensortap.bench.memory import MemoryMeter, PeakMemory
from tensortap.bench.trainer import Trainer, is_leaf

__all__ = ["KINDS", "TimedBlock", "plain", "tapped", "timed"]

KINDS = ("input", "output", "grad_output", "param_grad")
_WAITED = 15


@dataclass(frozen=True)
class TimedBlock:
    """Times and memory of several steps in a row."""

    steps: int
    seconds: float
    """Seconds per step, including the wait at the end."""
    each: float
    """Median of the single steps, without the wait at the end."""
    launching: float
    """Seconds that the host was busy with the first step; a GPU may take longer."""
    memory: PeakMemory
    waited: float | None = None
    """Median of further steps with a synchronisation after each, as by `loss.item()`; None if not measured."""
    stats: Mapping[str, Any] = field(default_factory=dict)
    """Statistics of the tap for the timed steps; counts are differences."""


def plain(trainer: Trainer, steps: int) -> TimedBlock:
    """Run plain training steps."""
    meter = MemoryMeter(trainer.device)
    trainer.step()
    times = timed(trainer, steps)
    return TimedBlock(steps, *times, meter.read(), _step_by_step(trainer, steps))


def tapped(trainer: Trainer, steps: int, folder: Path, keep: str) -> TimedBlock:
    """Run steps with all leaf modules tapped. The run is removed afterwards."""
    meter = MemoryMeter(trainer.device)
    try:
        with tensortap.capture(trainer.model, folder, keep=keep, kinds=KINDS, modules=is_leaf) as tap:
            # Buffers grow during the first steps, and a tap learns which reads it can defer: it does so from the third
            # step on.
            for _ in range(3 if keep == "summary" else 2):
                trainer.step()
                tap.step()
                tap.flush()
                remove_tensors(folder)
            before = tap.stats()
            times = timed(trainer, steps, tap.step, tap.flush)
            after, memory = tap.stats(), meter.read()
            waited = _step_by_step(trainer, steps, tap.step) if keep == "summary" else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return TimedBlock(steps, *times, memory, waited, _between(before, after))


def timed(
    trainer: Trainer,
    steps: int,
    after_each: Callable[[], None] = lambda: None,
    at_end: Callable[[], None] = lambda: None,
) -> tuple[float, float, float]:
    """Return seconds per step with and without the wait at the end, and the seconds to launch the first step."""
    marks = [_Mark(trainer.device) for _ in range(steps + 1)]
    trainer.synchronize()
    started = time.perf_counter()
    marks[0].set()
    launching = 0.0
    for mark in marks[1:]:
        trainer.step()
        after_each()
        launching = launching or time.perf_counter() - started
        mark.set()
    at_end()
    trainer.synchronize()
    seconds = (time.perf_counter() - started) / steps
    each = statistics.median(later.since(earlier) for earlier, later in pairwise(marks))
    return seconds, each, launching


def _step_by_step(trainer: Trainer, steps: int, after_each: Callable[[], None] = lambda: None) -> float | None:
    """Return the median of steps with a synchronisation after each, which exposes the host's work; None on a CPU."""
    if trainer.device == "cpu":
        return None
    taken = []
    for _ in range(min(steps, _WAITED)):
        started = time.perf_counter()
        trainer.step()
        after_each()
        trainer.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def remove_tensors(folder: Path) -> None:
    """Remove the finished tensor files of past steps, but not the index, which the tap still writes."""
    for path in folder.glob("rank_*/step_*.safetensors"):
        path.unlink()


class _Mark:
    """A point in time: on a GPU that of its stream, not of the host."""

    def __init__(self, device: str) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True) if device == "cuda" else None
        self._moment = 0.0

    def set(self) -> None:
        if self._event is not None:
            self._event.record()
        self._moment = time.perf_counter()

    def since(self, earlier: _Mark) -> float:
        if self._event is not None:
            return float(earlier._event.elapsed_time(self._event)) / 1e3
        return self._moment - earlier._moment


def _between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return counters as differences, and states such as a queue's depth or a peak unchanged."""
    states = ("queued", "peak_buffer_bytes")
    return {
        name: value - before.get(name, 0) if isinstance(value, (int, float)) and name not in states else value
        for name, value in after.items()
    }
