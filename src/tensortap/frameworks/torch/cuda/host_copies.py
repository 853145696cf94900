"""Copies whole tensors from a CUDA device to the host, concurrently with the step.

The stream that made a tensor first copies it within the device, into a ring. From then on it may be changed or freed. A
separate stream copies the ring's bytes to pinned host memory. A stream that finds the ring full waits on the device for
the blocking copies; the host waits only for host memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tensortap.kernels.cuda import driver

__all__ = ["CudaHostCopies", "CudaMemoryPinning"]

_RING = 512 << 20
_PART = 64 << 20
_ALIGNED = 256


class _Region(NamedTuple):
    start: int
    stop: int
    copied: torch.cuda.Event
    """Recorded once its bytes are copied."""


class _Part:
    """A range of bytes in the ring."""

    def __init__(self, nbytes: torch.Tensor, stream: torch.cuda.Stream, events: list[torch.cuda.Event]) -> None:
        self.size = nbytes.numel()
        self._bytes = nbytes
        self._stream = stream
        self._events = events

    def copy(self, target: npt.NDArray[np.uint8], start: int) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            torch.from_numpy(target).copy_(self._bytes[start : start + target.size], non_blocking=True)
        events = self._events
        try:
            arrived = events.pop()
        except IndexError:
            arrived = torch.cuda.Event(blocking=True)
        arrived.record(self._stream)

        def wait() -> None:
            driver.allow_captures()
            arrived.synchronize()
            events.append(arrived)  # nothing else waits for it, so it can be reused

        return wait


class CudaHostCopies:
    """The ring and the stream of one device."""

    def __init__(self, device: torch.device, ring: int = _RING, part: int = _PART) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._ring = torch.empty(ring, dtype=torch.uint8, device=device)
        self._part = min(part, ring // 4)
        self._next = 0
        self._regions: deque[_Region] = deque()
        self._events: list[torch.cuda.Event] = []
        """Events for reuse. Each slab needs one, and creating one takes longer than recording it."""
        self._freed: torch.cuda.Event | None = None
        """Recorded when the newest overwritten region was copied. Any stream may write there."""

    def parts(self, tensor: torch.Tensor) -> Iterator[_Part]:
        """Yield the tensor's bytes in C order. Each part must be copied completely before the next is requested."""
        tensor = tensor.detach()
        for piece in _pieces(tensor, self._part):
            nbytes = piece.numel() * piece.element_size()
            region = self._take(nbytes)
            with torch.no_grad(), torch.cuda.device(self._device):
                self._ring[region.start : region.stop].view(piece.dtype).view(piece.shape).copy_(piece)
                ready = torch.cuda.Event()
                ready.record()
            self._stream.wait_event(ready)
            try:
                yield _Part(self._ring[region.start : region.stop], self._stream, self._events)
            finally:
                region.copied.record(self._stream)

    def close(self) -> None:
        self._stream.synchronize()

    def _take(self, nbytes: int) -> _Region:
        if self._next + nbytes > self._ring.numel():
            self._make_room(self._next, self._ring.numel())
            self._next = 0
        start, stop = self._next, self._next + nbytes
        self._make_room(start, stop)
        if self._freed is not None:
            torch.cuda.current_stream(self._device).wait_event(self._freed)
        self._next = math.ceil(stop / _ALIGNED) * _ALIGNED
        region = _Region(start, stop, torch.cuda.Event())
        self._regions.append(region)
        return region

    def _make_room(self, start: int, stop: int) -> None:
        """Drop the regions in a range. The single stream copies in order, so the last one's event is enough."""
        while self._regions and start <= self._regions[0].start < stop:
            self._freed = self._regions.popleft().copied


def _pieces(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield the tensor in C order, at most `limit` bytes at a time, with strides that the copy makes contiguous."""
    if tensor.numel() == 0:
        return
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= limit:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(limit // tensor.element_size())
    else:
        rows = max(1, limit // (nbytes // len(tensor)))
        for some in tensor.split(rows):
            yield from _pieces(some[0] if len(some) == 1 else some, limit)


class CudaMemoryPinning:
    """Page-locks existing memory."""

    def __init__(self) -> None:
        self._pinned: set[int] = set()

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        # If pinning is refused, copies into the memory still work, but block.
        try:
            if driver.pin(memory.ctypes.data, memory.nbytes):
                self._pinned.add(memory.ctypes.data)
        except driver.CudaError:  # a device of another vendor
            pass

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        if memory.ctypes.data in self._pinned:
            self._pinned.remove(memory.ctypes.data)
            driver.unpin(memory.ctypes.data)
