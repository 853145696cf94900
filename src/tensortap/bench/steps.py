"""The ways a step can run: plain, tapped, and with np.save in hooks. Each runs a block of steps and says what it took.

A block begins with one or two steps that are not timed, in which buffers are made. Then the clock runs from an idle
device until the last step's last byte is with the operating system: nothing that was put off is left out.
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
from tensortap.bench.memory import Memory, Meter
from tensortap.bench.trainer import Trainer, is_leaf

__all__ = ["KINDS", "Block", "plain", "tapped", "timed"]

KINDS = ("input", "output", "grad_output", "param_grad")
_WAITED = 15


@dataclass(frozen=True)
class Block:
    """What some steps in a row took."""

    steps: int
    seconds: float
    """A step, with its share of what was waited for at the end."""
    each: float
    """The median of the single steps, from one's end to the next one's, without the wait at the end."""
    launching: float
    """How long the host was busy with the first one; on a GPU, which it does not wait for, less than the step takes."""
    memory: Memory
    waited: float | None = None
    """The median of further steps, each waited for until its device has done it, as by `loss.item()`; None where it was
    not measured."""
    stats: Mapping[str, Any] = field(default_factory=dict)
    """Of the tap, for the timed steps: counts are differences."""


def plain(trainer: Trainer, steps: int) -> Block:
    """Nothing but training."""
    meter = Meter(trainer.device)
    trainer.step()
    times = timed(trainer, steps)
    return Block(steps, *times, meter.read(), _step_by_step(trainer, steps))


def tapped(trainer: Trainer, steps: int, folder: Path, keep: str) -> Block:
    """All leaf modules tapped. The run is removed afterwards."""
    meter = Meter(trainer.device)
    try:
        with tensortap.capture(trainer.model, folder, keep=keep, kinds=KINDS, modules=is_leaf) as tap:
            # The memory that tensors wait in grows while it is short; a tap learns which may be read together, and does
            # so from the third step on.
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
    return Block(steps, *times, memory, waited, _between(before, after))


def timed(
    trainer: Trainer,
    steps: int,
    after_each: Callable[[], None] = lambda: None,
    at_end: Callable[[], None] = lambda: None,
) -> tuple[float, float, float]:
    """Seconds a step, with and without the wait at the end, and those of launching the first."""
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
    """On a device that nobody waits for, the host is far ahead, and what it does is hidden. Here little is."""
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
    """Make room: the finished files of past steps. The index stays, for the tap writes to it."""
    for path in folder.glob("rank_*/step_*.safetensors"):
        path.unlink()


class _Mark:
    """A moment: on a GPU one of its stream's, not of the host that runs ahead of it."""

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
    """What grew, as a difference; what is a state, such as a queue's depth or a peak, as it is."""
    states = ("queued", "peak_buffer_bytes")
    return {
        name: value - before.get(name, 0) if isinstance(value, (int, float)) and name not in states else value
        for name, value in after.items()
    }
