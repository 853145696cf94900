"""Does budget= hold? A Llama's training plain and with `budget=0.02`, on a GPU or a CPU.

    python benchmarks/budget.py [--budget 0.02] [--rounds 5] [--steps 200 | --seconds 30] [--device auto] [--interleave]

Blocks of plain and of tapped steps alternate in one process. A tapped block includes opening and closing its run, and
ends when its last byte is written and the device has finished. The ratio of all blocks is printed with the tap's own
estimate; the target is 1 + budget, within one percent.

--interleave is for a CPU that others use, too: plain and tapped steps of two equal models alternate one by one, and the
CPU time of the process is compared instead of the time on the clock. The tap's own clock stands still meanwhile.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

import tensortap as tt
from tensortap.bench.model import ModelSize, size_of
from tensortap.bench.trainer import Trainer, device_of
from tensortap.capture.budget import Budget


def plain(trainer: Trainer, steps: int) -> float:
    trainer.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    trainer.synchronize()
    return time.perf_counter() - started


def tapped(trainer: Trainer, steps: int, budget: float, folder: Path) -> tuple[float, str]:
    trainer.synchronize()
    started = time.perf_counter()
    with tt.capture(trainer.model, folder, budget=budget, overwrite=True) as tap:
        for _ in range(steps):
            trainer.step()
            tap.step()
        tap.flush()
        trainer.synchronize()
    seconds = time.perf_counter() - started
    said = next(text for text in tap.notices if text.startswith("budget="))
    return seconds, said


class Stopwatch:
    """A clock that can stand still."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = time.perf_counter()

    def __call__(self) -> float:
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    def pause(self) -> None:
        self._before, self._since = self(), None

    def resume(self) -> None:
        self._since = time.perf_counter()


def interleaved(size: ModelSize, budget: float, seconds: float, folder: Path) -> str:
    """Alternate steps of a plain model and of a tapped one, and compare their CPU time."""
    other, own = Trainer(size, "cpu"), Trainer(size, "cpu")
    tapped(Trainer(size, "cpu"), 8, budget, folder)  # loads kernels
    for trainer in (other, own, other, own):
        trainer.step()
    watch = Stopwatch()
    # The module, not the function of that name; its Budget takes the clock that can stand still.
    setattr(importlib.import_module("tensortap.capture.tap"), "Budget", partial(Budget, clock=watch))  # noqa: B010
    spent, taken = 0.0, time.process_time()
    end, steps = time.perf_counter() + seconds, 0
    with tt.capture(own.model, folder, budget=budget, overwrite=True) as tap:
        while time.perf_counter() < end:
            own.step()
            tap.step()
            watch.pause()
            begun = time.process_time()
            other.step()
            spent += time.process_time() - begun
            watch.resume()
            steps += 1
    ratio = (time.process_time() - taken - spent) / spent
    said = next(text for text in tap.notices if text.startswith("budget="))
    return f"{steps} steps of {1e3 * spent / steps:.2f} ms of CPU time, ratio {ratio:.4f}; {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="steps of a block; otherwise as many as --seconds take")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a block: opening a run is part of it")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--model", help="llama-0.95b, llama-small or llama-tiny")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--interleave", action="store_true", help="compare CPU time, step by step; for a CPU")
    given = parser.parse_args()
    device = device_of(given.device)
    if device == "cpu":
        torch.set_num_threads(given.threads)
    name, size = size_of(given.model, device)
    if given.interleave:
        with tempfile.TemporaryDirectory(prefix="tensortap-") as scratch:
            print(f"{name}: {interleaved(size, given.budget, given.seconds, Path(scratch) / 'run')}")
        return
    trainer = Trainer(size, device)
    ratios, seconds = [], {"plain": 0.0, "tapped": 0.0}
    with tempfile.TemporaryDirectory(prefix="tensortap-") as scratch:
        folder = Path(scratch) / "run"
        plain(trainer, 5)
        steps = given.steps or max(64, int(given.seconds / (plain(trainer, 20) / 20)))
        tapped(trainer, 8, given.budget, folder)  # loads kernels
        for turn in range(given.rounds):
            # In turns, so that neither is always measured right after the other.
            order = ("plain", "tapped") if turn % 2 else ("tapped", "plain")
            took: dict[str, float] = {}
            for way in order:
                if way == "plain":
                    took[way] = plain(trainer, steps)
                else:
                    took[way], said = tapped(trainer, steps, given.budget, folder)
            ratios.append(took["tapped"] / took["plain"])
            for way, each in took.items():
                seconds[way] += each
            step = took["plain"] / steps
            print(f"{device} {name}: plain {1e3 * step:.2f} ms a step, ratio {ratios[-1]:.4f}; {said}")
    total = seconds["tapped"] / seconds["plain"]
    print(f"all blocks {total:.4f}, median {statistics.median(ratios):.4f}, target {1 + given.budget:.3f} ± 0.010")


if __name__ == "__main__":
    main()
