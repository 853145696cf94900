"""Whole tensors from a CUDA device to the host, beside the step.

A tensor is first copied within the device, into a ring, by the stream that made it: from then on it may be changed or
freed. A stream of our own brings the ring's bytes to pinned host memory. A stream that finds the ring full waits on the
device for the copies that are in its way; the host waits only for host memory.
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

__all__ = ["CudaMemoryPinning", "CudaSending"]

_RING = 512 << 20
_PART = 64 << 20
_ALIGNED = 256


class _Region(NamedTuple):
    start: int
    stop: int
    gone: torch.cuda.Event
    """Recorded once its bytes have left."""


class _Part:
    """Some bytes in the ring."""

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
            events.append(arrived)  # nobody else waits for it: it may be recorded again

        return wait


class CudaSending:
    """One device's ring and stream."""

    def __init__(self, device: torch.device, ring: int = _RING, part: int = _PART) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._ring = torch.empty(ring, dtype=torch.uint8, device=device)
        self._part = min(part, ring // 4)
        self._next = 0
        self._regions: deque[_Region] = deque()
        self._events: list[torch.cuda.Event] = []
        """Those that were waited for. Each slab needs one, and making one takes longer than recording it."""
        self._freed: torch.cuda.Event | None = None
        """When the youngest region that is being written over had left. Any stream may come to write there."""

    def parts(self, tensor: torch.Tensor) -> Iterator[_Part]:
        """The tensor's bytes in C order. Each part must be copied as a whole before the next is asked for."""
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
                region.gone.record(self._stream)

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
        """The oldest region is always the next one in the way. The one stream copies in order: its last is enough."""
        while self._regions and start <= self._regions[0].start < stop:
            self._freed = self._regions.popleft().gone


def _pieces(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """The tensor in C order, at most `limit` bytes at a time; in its own strides, which the copy will straighten."""
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
    """Page-locks memory that is already there."""

    def __init__(self) -> None:
        self._pinned: set[int] = set()

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        # Where it is refused, copies into the memory work too: they wait.
        try:
            if driver.pin(memory.ctypes.data, memory.nbytes):
                self._pinned.add(memory.ctypes.data)
        except driver.CudaError:  # a device of another make
            pass

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        if memory.ctypes.data in self._pinned:
            self._pinned.remove(memory.ctypes.data)
            driver.unpin(memory.ctypes.data)
