"""The host's cost of a record: training steps whose tensors are so small that the tap's own work is all that counts.

    python benchmarks/host.py [--model tiny] [--device auto] [--rounds 5] [--steps 20] [--ways default,leaves,...]
    python benchmarks/host.py --opening 10000 50000

All ways take turns in one process. A tapped block of steps ends when its last byte is with the operating system. The
medians over the rounds are printed: milliseconds a step, the ratio to the plain step of the same round, and
microseconds a record. `flush ms` is how long a block waits for its last rows when its device is idle. `hooks` are as
many module hooks as the tap has, which only append to a list. With `--opening` the time to open and close a tap on a
model of so many modules is printed instead.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import tensortap as tt

Step = Callable[[], None]
ALL_KINDS = ("input", "output", "grad_input", "grad_output", "param_grad", "param", "buffer")
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "leaves": {"modules": lambda name, module: not list(module.children())},
    "all kinds": {"kinds": ALL_KINDS},
    "every tenth": {"steps": range(0, 1 << 40, 10)},
    "tensors": {"keep": "tensors"},
    "placed": {"layout": {"mesh": {"dp": 2}}},
}
"""Options of each tap. `placed` is that of the second of two processes: each record has its place in a whole."""


class Block(nn.Module):
    """A block of a small transformer without attention: its modules matter, not what they compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.norm2, self.up, self.act, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Tiny(nn.Module):
    def __init__(self, layers: int = 12, width: int = 16, words: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def tiny(device: str) -> tuple[nn.Module, Step]:
    """Return a model of 78 modules and its training step; all of its tensors have less than 4 KB."""
    model = Tiny().to(device)
    tokens = torch.randint(0, 50, (2, 9), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def hf_llama(device: str, checkpointed: bool = False, large: bool = False) -> tuple[nn.Module, Step]:
    """Return transformers' Llama of 16 layers and its training step.

    It is bound by its launches; a large one has 0.95 billion parameters in bfloat16, and is bound by its arithmetic.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 2048 if large else 256 if device == "cuda" else 32
    config = LlamaConfig(
        vocab_size=32_000 if large else 512,
        hidden_size=width,
        intermediate_size=5632 if large else 2 * width,
        num_hidden_layers=16,
        num_attention_heads=16 if large else 4,
        num_key_value_heads=16 if large else 4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16 if large else torch.float32)
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    shape = (4, 2048) if large else (1, 128 if device == "cuda" else 8)
    tokens = torch.randint(0, 512, shape, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


MODELS: dict[str, Callable[[str], tuple[nn.Module, Step]]] = {
    "tiny": tiny,
    "hf-llama": hf_llama,
    "hf-llama-checkpointed": lambda device: hf_llama(device, checkpointed=True),
    "hf-llama-0.95b": lambda device: hf_llama(device, large=True),
    "hf-llama-0.95b-checkpointed": lambda device: hf_llama(device, checkpointed=True, large=True),
}


class _Clock:
    """Measures time and the CPU time of all threads: on a machine with other work, the latter says more."""

    def __init__(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    def read(self, steps: int) -> dict[str, float]:
        now = time.perf_counter(), time.process_time()
        return {"seconds": (now[0] - self._started[0]) / steps, "cpu": (now[1] - self._started[1]) / steps}


def plain(model: nn.Module, step: Step, steps: int, wait: Step) -> dict[str, float]:
    clock = _Clock()
    for _ in range(steps):
        step()
    wait()
    return clock.read(steps)


def hooked(model: nn.Module, step: Step, steps: int, wait: Step) -> dict[str, float]:
    """Run steps with hooks that append what they see to a list."""
    seen: list[Any] = []
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda _, a, k: seen.append(a), with_kwargs=True))
        handles.append(module.register_forward_hook(lambda _, a, k, out: seen.append(out), with_kwargs=True))
    clock = _Clock()
    for _ in range(steps):
        step()
        seen.clear()
    wait()
    result = clock.read(steps)
    for handle in handles:
        handle.remove()
    return result


def tapped(options: dict[str, Any]) -> Callable[[nn.Module, Step, int, Step], dict[str, float]]:
    def measure(model: nn.Module, step: Step, steps: int, wait: Step) -> dict[str, float]:
        group = {"RANK": "1", "WORLD_SIZE": "2"} if "layout" in options else {}
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, group):
            started = time.perf_counter()
            with tt.capture(model, Path(folder) / "run", **options) as tap:
                opened = time.perf_counter() - started
                for _ in range(3):  # the first steps learn
                    step()
                    tap.step()
                tap.flush()
                wait()
                first = time.perf_counter() - started - opened
                before = tap.stats()["records"]
                clock = _Clock()
                for _ in range(steps):
                    step()
                    tap.step()
                wait()
                idle = time.perf_counter()
                tap.flush()
                flushed = time.perf_counter() - idle
                result = clock.read(steps)
                records = (tap.stats()["records"] - before) / steps
        return result | {"records": records, "opened": opened, "first": first, "flushed": flushed}

    return measure


def report(found: dict[str, list[dict[str, float]]]) -> None:
    line = "{:14}{:>9}{:>8}{:>9}{:>8}{:>10}{:>11}{:>15}{:>10}{:>13}{:>11}".format
    columns = ("ms/step", "ratio", "CPU ms", "ratio", "records", "µs/record", "CPU µs/record", "open ms", "first 3, ms")
    columns += ("flush ms",)
    print(line("way", *columns))
    for name, results in found.items():
        numbers = []
        for what in ("seconds", "cpu"):
            ratios = [each[what] / base[what] for each, base in zip(results, found["plain"], strict=True)]
            numbers += [f"{1e3 * _median(results, what):.2f}", f"{statistics.median(ratios):.3f}"]
        if "records" in results[0]:
            numbers.append(f"{_median(results, 'records'):.0f}")
            for what in ("seconds", "cpu"):
                over = [each[what] - base[what] for each, base in zip(results, found["plain"], strict=True)]
                numbers.append(f"{1e6 * statistics.median(over) / max(_median(results, 'records'), 1):.1f}")
            numbers += [f"{1e3 * _median(results, what):.1f}" for what in ("opened", "first", "flushed")]
        print(line(name, *numbers, *[""] * (10 - len(numbers))))


def _median(results: list[dict[str, float]], what: str) -> float:
    return statistics.median(each[what] for each in results)


def opening(sizes: list[int]) -> None:
    """Print how long a tap on a model of many modules takes to open and to close."""
    print(f"{'modules':>9}{'open s':>9}{'close s':>9}   (CPU seconds)")
    for size in sizes:
        model = nn.ModuleList(nn.Sequential(*(nn.Linear(1, 1) for _ in range(9))) for _ in range(size // 10))
        opened, closed = [], []
        for _ in range(3):
            gc.collect()
            with tempfile.TemporaryDirectory() as folder:
                started = time.process_time()
                tap = tt.capture(model, Path(folder) / "run")
                opened.append(time.process_time() - started)
                started = time.process_time()
                tap.close()
                closed.append(time.process_time() - started)
        count = sum(1 for _ in model.modules())
        print(f"{count:9}{statistics.median(opened):9.3f}{statistics.median(closed):9.3f}")


def compare_ways(name: str, device: str, ways: Iterable[str], rounds: int, steps: int) -> None:
    """Time the ways of tapping a model in turns, and print the medians."""
    torch.manual_seed(0)
    model, step = MODELS[name](device)
    wait: Step = torch.cuda.synchronize if device == "cuda" else lambda: None
    taps = {"plain": plain, "hooks": hooked} | {way: tapped(WAYS[way]) for way in ways}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in taps}
    for turn in range(rounds + 1):
        for way, run in taps.items():
            gc.collect()
            result = run(model, step, steps, wait)
            if turn:  # the first round warms up
                found[way].append(result)
    print(f"{name} on {device}, torch {torch.__version__}, {rounds} rounds of {steps} steps")
    report(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps in a row that are timed together")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ways", default=",".join(WAYS), help="which taps to time, separated by commas")
    parser.add_argument("--opening", type=int, nargs="+", metavar="MODULES", help="time opening a tap instead")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.opening:
        opening(given.opening)
        return
    device = ("cuda" if torch.cuda.is_available() else "cpu") if given.device == "auto" else given.device
    compare_ways(given.model, device, filter(None, given.ways.split(",")), given.rounds, given.steps)


if __name__ == "__main__":
    main()
