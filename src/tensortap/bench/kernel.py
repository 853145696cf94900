"""The speed of the device's summary kernel alone, on a large tensor and on small ones."""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensortap.bench.limits import device_seconds
from tensortap.frameworks.torch.cuda.reader import CudaReader
from tensortap.kernels.cuda.driver import CudaError

__all__ = ["summary_kernel_speed"]

_LARGE = 1 << 30
_OFTEN = 8
_SMALL = 1000


def summary_kernel_speed() -> dict[str, float] | None:
    """Return bytes per second for a large tensor and seconds for a small one; None without a kernel."""
    summarize = _enqueue()
    if summarize is None:
        return None
    large = torch.randn(_LARGE // 2, device="cuda", dtype=torch.bfloat16)
    small = [torch.randn(64, device="cuda", dtype=torch.bfloat16) for _ in range(_SMALL)]
    often = device_seconds(lambda: summarize([large] * _OFTEN))
    many = device_seconds(lambda: summarize(small))
    return {"bytes_per_second": _OFTEN * _LARGE / often, "seconds_a_small_tensor": many / _SMALL}


def _enqueue() -> Callable[[list[Any]], object] | None:
    """Return a function that summarises CUDA tensors asynchronously; None if there is no kernel."""
    if torch.version.hip is not None:
        return None
    device_reader = CudaReader()
    try:
        device_reader.submit(torch.zeros(8, device="cuda", dtype=torch.bfloat16))
    except CudaError:
        return None
    under_way: list[Any] = []

    def summarize(tensors: list[Any]) -> None:
        tickets = [device_reader.submit(tensor) for tensor in tensors]
        device_reader.end_step()
        if under_way:  # arrived long ago; collecting frees its memory while the device is busy
            device_reader.collect(under_way)
        under_way[:] = tickets

    return summarize
