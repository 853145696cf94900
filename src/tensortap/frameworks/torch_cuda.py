"""CUDA tensors, looked at where they are: summaries are launched at once and known later.

Each stream has a lane of its own: room for partial results, room for results, and a copy of these to the host for each
step. Nothing here waits for the device unless somebody asks for a summary that has not arrived, and nothing is
allocated once the lanes have seen their largest step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tensortap.frameworks.base import Incoming, Sent
from tensortap.frameworks.torch_sending import CudaSending
from tensortap.frameworks.torch_tensors import NAMES, dense
from tensortap.kernels.gpu import (
    MOST_FINISHED,
    PARTIAL_BYTES,
    RESULT,
    Device,
    Gpu,
    Layout,
    Pending,
    lay_out,
    summaries,
)
from tensortap.kernels.reference import digest_weights
from tensortap.records import Summary

__all__ = ["CudaTicket", "CudaWorkshop"]

_SLOTS = 1024
_PARTIALS = 24 << 20


class CudaTicket:
    """A summary that is on its way."""

    __slots__ = ("_batch", "_number", "address", "elements", "lane", "same_as")

    def __init__(self, batch: _Batch, lane: _Lane, address: int, elements: int, same_as: CudaTicket | None) -> None:
        self._batch = batch
        self._number = len(batch.tickets)
        self.lane = lane
        self.address = address
        """Of its result on the device, while the step lasts."""
        self.elements = elements
        self.same_as = same_as

    def ready(self) -> bool:
        return self._batch.arrived()

    def summary(self) -> Summary:
        """Waits for it if need be."""
        found = self._batch.summary(self._number)
        if found is not None:
            return found
        assert self.same_as is not None
        return self.same_as.summary()

    def unchanged(self) -> bool:
        """Whether the tensor that it was thought to be is still what it was. Waits if need be."""
        return self._batch.summary(self._number) is None


class _Batch:
    """Results that travel together."""

    def __init__(self, lane: _Lane) -> None:
        self._lane = lane
        self.tickets: list[CudaTicket] = []
        self._host: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._summaries: list[Summary | None] = []

    def send(self, results: torch.Tensor, host: torch.Tensor) -> None:
        nbytes = len(self.tickets) * RESULT.itemsize
        host[:nbytes].copy_(results[:nbytes], non_blocking=True)
        self._host = host
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self) -> bool:
        return bool(self._summaries) or (self._event is not None and self._event.query())

    def summary(self, number: int) -> Summary | None:
        if not self._summaries:
            if self._event is None:
                self._lane.send()
            assert self._event is not None and self._host is not None
            self._event.synchronize()
            count = len(self.tickets)
            rows = self._host.numpy()[: count * RESULT.itemsize].view(RESULT)
            elements = np.array([ticket.elements for ticket in self.tickets], np.int64)
            same = rows["unchanged"].astype(bool).tolist()
            self._summaries = [None if k else s for k, s in zip(same, summaries(rows, elements), strict=True)]
            self._lane.give_back(self._host)
            self._host = None
            self.tickets = []  # they hold this batch
        return self._summaries[number]


class _Lane:
    """One stream's memory. Everything happens in the stream's order, so it can be used again without waiting."""

    def __init__(self, gpu: Gpu, weights: torch.Tensor, device: torch.device, stream: int) -> None:
        self._gpu = gpu
        self._weights = weights
        self._device = device
        self._stream = stream
        self._partials = torch.empty(max(_PARTIALS, gpu.most_blocks * PARTIAL_BYTES), dtype=torch.uint8, device=device)
        self._most = self._partials.numel() // PARTIAL_BYTES
        self._used = 0
        self._pending: list[Pending] = []
        self._results: list[torch.Tensor] = []
        self._current = 0
        """Which of the results is being filled. Earlier ones of a step stay: later sightings look at their probes."""
        self._free: deque[torch.Tensor] = deque()
        self._batch = _Batch(self)

    def submit(self, tensor: torch.Tensor, layout: Layout, known: CudaTicket | None) -> CudaTicket:
        if known is not None and known.lane is not self:  # in another stream it may not have been finished yet
            known = None
        if len(self._batch.tickets) == _SLOTS:
            self.send()
            self._current += 1
        if self._current == len(self._results):
            size = _SLOTS * RESULT.itemsize
            self._results.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        elements = tensor.numel()
        blocks = self._gpu.blocks(elements)
        if self._used + blocks > self._most or len(self._pending) == MOST_FINISHED:
            self._finish()
        slot = len(self._batch.tickets)
        address = self._results[self._current].data_ptr() + slot * RESULT.itemsize
        self._gpu.summarize(
            NAMES[tensor.dtype],
            tensor.data_ptr(),
            elements,
            layout,
            weights=self._weights.data_ptr(),
            partials=self._partials.data_ptr() + self._used * PARTIAL_BYTES,
            result=address,
            known=known.address if known is not None else 0,
            stream=self._stream,
        )
        self._pending.append(Pending(self._used, blocks, slot))
        self._used += blocks
        ticket = CudaTicket(self._batch, self, address, elements, known)
        self._batch.tickets.append(ticket)
        return ticket

    def send(self) -> None:
        """Let what was submitted so far travel to the host."""
        if not self._batch.tickets:
            return
        if self._free:
            host = self._free.popleft()
        else:
            host = torch.empty(_SLOTS * RESULT.itemsize, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(_stream(self._stream, self._device)):
            self._finish()
            self._batch.send(self._results[self._current], host)
        self._batch = _Batch(self)

    def end_step(self) -> None:
        self.send()
        self._current = 0

    def give_back(self, host: torch.Tensor) -> None:
        self._free.append(host)

    def _finish(self) -> None:
        if self._pending:
            results = self._results[self._current].data_ptr()
            self._gpu.finish(self._pending, self._partials.data_ptr(), results, self._stream)
            self._pending.clear()
            self._used = 0


def _stream(raw: int, device: torch.device) -> Any:
    # ExternalStream takes 0, the default stream, for the wish for a new one.
    return torch.cuda.ExternalStream(raw, device) if raw else torch.cuda.default_stream(device)


class CudaWorkshop:
    """Takes tensors of any CUDA device and stream. CudaError where the kernels cannot be compiled or launched."""

    def __init__(self) -> None:
        self._gpus: dict[int, tuple[Gpu, torch.Tensor]] = {}
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._sending: dict[int, CudaSending] = {}

    def submit(self, tensor: torch.Tensor, known: CudaTicket | None = None) -> CudaTicket:
        tensor = dense(tensor)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        layout = lay_out(tensor.shape, tensor.stride(), tensor.element_size(), tensor.data_ptr())
        if layout is None:
            tensor = tensor.contiguous()
            layout = Layout(0, (), ())
        index = tensor.get_device()
        stream = torch._C._cuda_getCurrentRawStream(index)
        lane = self._lanes.get((index, stream))
        if lane is None:
            lane = self._lanes[index, stream] = self._open_lane(index, stream)
        return lane.submit(tensor, layout, known)

    def send(self, tensor: torch.Tensor) -> Sent:
        tensor = dense(tensor)
        return Sent(NAMES[tensor.dtype], tuple(tensor.shape), self._parts(tensor))

    def _parts(self, tensor: torch.Tensor) -> Iterator[Incoming]:
        index = tensor.get_device()
        if index not in self._sending:
            self._sending[index] = CudaSending(tensor.device)
        yield from self._sending[index].parts(tensor)

    def end_step(self) -> None:
        for lane in self._lanes.values():
            lane.end_step()

    def close(self) -> None:
        for sending in self._sending.values():
            sending.close()
        self._sending.clear()
        self._lanes.clear()

    def _open_lane(self, index: int, stream: int) -> _Lane:
        device = torch.device("cuda", index)
        if index not in self._gpus:
            processors = torch.cuda.get_device_properties(index).multi_processor_count
            gpu = Gpu(Device(torch.cuda.get_device_capability(index), processors, torch.version.cuda or ""))
            weights = torch.from_numpy(digest_weights().view(np.int32)).to(device)
            torch.cuda.current_stream(index).synchronize()  # other streams read it too
            self._gpus[index] = gpu, weights
        gpu, weights = self._gpus[index]
        return _Lane(gpu, weights, device, stream)
