"""Limits of this machine, measured in the same run as the tap."""
# mypy: allow-untyped-calls

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["device_launch", "device_read", "device_seconds", "device_to_host", "memory_read"]

_REPEATS = 7


def device_read(nbytes: int = 4 << 30) -> float:
    """Return bytes per second of a pass that only reads the GPU's memory: the fastest of several reductions."""
    words = torch.ones(_fitting(nbytes) // 4, dtype=torch.int32, device="cuda")
    size = words.numel() * 4
    floats, halves, doubles = (words.view(kind) for kind in (torch.float32, torch.bfloat16, torch.int64))
    passes: tuple[Callable[[], object], ...] = (
        lambda: floats.sum(),
        lambda: floats.amax(),
        lambda: words.amax(),
        lambda: halves.amax(),
        lambda: doubles.sum(),
        lambda: torch.linalg.vector_norm(floats),
    )
    return float(size / min(device_seconds(each) for each in passes))


def device_to_host(nbytes: int = 1 << 30) -> float:
    """Return bytes per second from the GPU into pinned host memory."""
    source = torch.ones(_fitting(nbytes), dtype=torch.uint8, device="cuda")
    target = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
    return float(source.numel() / device_seconds(lambda: target.copy_(source, non_blocking=True)))


def device_launch(count: int = 2000) -> float:
    """Return the seconds of one small operation in a series of launches."""
    tiny = torch.zeros(32, device="cuda")

    def launches() -> None:
        for _ in range(count):
            tiny.add_(1.0)

    return device_seconds(launches) / count


def memory_read(nbytes: int = 1 << 30) -> float:
    """Return bytes per second of a pass that only reads host memory, with all threads of torch."""
    floats = torch.ones(nbytes // 4)
    passes: tuple[Callable[[], object], ...] = (lambda: floats.sum(), lambda: floats.amax())
    return nbytes / min(_host_seconds(each) for each in passes)


def device_seconds(work: Callable[[], object]) -> float:
    """Return the median time of several runs by the GPU's clock, after a warm-up."""
    work()
    spans = []
    for _ in range(_REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        spans.append(first.elapsed_time(last) / 1e3)
    return float(statistics.median(spans))


def _host_seconds(work: Callable[[], object]) -> float:
    """Return the time of the fastest of several runs: other load does not count as a limit."""
    spans = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        work()
        spans.append(time.perf_counter() - started)
    return min(spans)


def _fitting(nbytes: int) -> int:
    """Return at most a quarter of the free memory."""
    free, _ = torch.cuda.mem_get_info()
    return int(min(nbytes, free // 4)) // 16 * 16
