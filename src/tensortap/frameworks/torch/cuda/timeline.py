"""Points on the timeline of a CUDA device, for durations that are measured without waiting."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CudaMark", "cuda_mark"]


class CudaMark:
    """An event in the current stream."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_to(self, later: Any) -> float | None:
        """Return the time between two marks; None if the device has not reached the later one."""
        if not later._event.query():
            return None
        return float(self._event.elapsed_time(later._event)) / 1e3


def cuda_mark(model: torch.nn.Module) -> CudaMark | None:
    """Return a mark if the model is on a CUDA device, and no graph is being captured."""
    first = next(model.parameters(), None)
    if first is None or first.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return CudaMark()
