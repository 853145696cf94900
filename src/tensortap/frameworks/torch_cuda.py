"""CUDA tensors, looked at where they are: summaries are launched at once and known later.

Each stream has a lane of its own: room for partial results, room for results, and a copy of these to the host for each
step. Nothing here waits for the device unless somebody asks for a summary that has not arrived, and nothing is
allocated once the lanes have seen their largest step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tensortap.frameworks.base import Collected
from tensortap.frameworks.torch_sending import CudaSending
from tensortap.frameworks.torch_tensors import NAMES, PLAIN, dense
from tensortap.kernels.cuda import driver
from tensortap.kernels.gpu import (
    FLAT,
    MOST_FINISHED,
    PARTIAL_BYTES,
    RESULT,
    Device,
    Gpu,
    Layout,
    Plan,
    columns,
    lay_out,
)
from tensortap.kernels.reference import digest_weights
from tensortap.sending import Incoming

__all__ = ["CudaTicket", "CudaWorkshop"]

_SLOTS = 1024
_PARTIALS = 28 << 20
_RESULT_BYTES = RESULT.itemsize
_MOST_PLANS = 4096


class CudaTicket(NamedTuple):
    """A summary that is on its way."""

    batch: _Batch
    number: int
    """Its place in the batch."""
    elements: int
    known: CudaTicket | None

    @property
    def address(self) -> int:
        """Of its result on the device, while the step lasts."""
        return self.batch.address + self.number * _RESULT_BYTES

    @property
    def probed(self) -> bool:
        """Whether a few elements were compared with `known` first; if not, all were read. In another stream `known` may
        not have been finished yet."""
        return self.known is not None and self.known.batch.lane is self.batch.lane


class _Batch:
    """Results that travel together."""

    def __init__(self, lane: _Lane, results: torch.Tensor) -> None:
        self.lane = lane
        self.size = 0
        """So many have been submitted."""
        self.address: int = results.data_ptr()
        self._results = results
        self._host: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._rows: npt.NDArray[Any] | None = None
        self.unchanged: list[bool] = []

    def send(self, host: torch.Tensor) -> None:
        nbytes = self.size * RESULT.itemsize
        host[:nbytes].copy_(self._results[:nbytes], non_blocking=True)
        self._host = host
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def rows(self) -> npt.NDArray[Any]:
        """Waits until they have arrived."""
        if self._rows is None:
            assert self._event is not None and self._host is not None
            driver.allow_captures()
            self._event.synchronize()
            self._rows = self._host.numpy()[: self.size * RESULT.itemsize].view(RESULT).copy()
            self.unchanged = self._rows["unchanged"].astype(bool).tolist()
            self.lane.give_back(self._host)
            self._host = None
        return self._rows


class _Lane:
    """One stream's memory. Everything happens in the stream's order, so it can be used again without waiting."""

    def __init__(self, gpu: Gpu, weights: torch.Tensor, device: torch.device, stream: int) -> None:
        self._gpu = gpu
        self._weights = weights
        self._weights_at = weights.data_ptr()
        self._device = device
        self._stream = stream
        self._partials = torch.empty(max(_PARTIALS, gpu.most_blocks * PARTIAL_BYTES), dtype=torch.uint8, device=device)
        self._partials_at = self._partials.data_ptr()
        self._most = self._partials.numel() // PARTIAL_BYTES
        self._used = 0
        self._pending: list[int] = []
        """Partial results that wait to be added up, as `Gpu.finish` takes them."""
        self._plans: dict[tuple[torch.dtype, int, Layout], Plan] = {}
        self._results: list[torch.Tensor] = []
        self._current = 0
        """Which of the results is being filled. Earlier ones of a step stay: later sightings look at their probes."""
        # Page-locking memory holds the device up, so enough for the steps under way is locked beforehand.
        self._free = deque(_new_host() for _ in range(4))
        self._batch: _Batch | None = None

    def submit(self, tensor: torch.Tensor, address: int, layout: Layout, known: CudaTicket | None) -> CudaTicket:
        # Called for every tensor of a step, by the thread that launches the step: hence plain numbers where possible.
        batch = self._batch
        if batch is None or batch.size == _SLOTS:
            batch = self._next_batch()
        elements = tensor.numel()
        kind = tensor.dtype, elements, layout
        plan = self._plans.get(kind) or self._new_plan(*kind)
        if self._used + plan.blocks > self._most or len(self._pending) == 4 * MOST_FINISHED:
            self._finish(batch)
        used, number = self._used, batch.size
        ticket = CudaTicket(batch, number, elements, known)
        expected = known.address if known is not None and ticket.probed else 0
        plan.read(address, self._partials_at + used * PARTIAL_BYTES, batch.address + number * _RESULT_BYTES, expected)
        self._pending += (used, plan.blocks, number, 0)
        self._used = used + plan.blocks
        batch.size = number + 1
        return ticket

    def send(self) -> None:
        """Let what was submitted so far travel to the host."""
        batch = self._batch
        if batch is None or not batch.size:
            return
        if self._free:
            host = self._free.popleft()
        else:
            host = _new_host()
        with torch.cuda.stream(_stream(self._stream, self._device)):
            self._finish(batch)
            batch.send(host)
        self._batch = None

    def end_step(self) -> None:
        self.send()
        self._current = 0

    def give_back(self, host: torch.Tensor) -> None:
        self._free.append(host)

    def _new_plan(self, dtype: torch.dtype, elements: int, layout: Layout) -> Plan:
        if len(self._plans) == _MOST_PLANS:  # tensors of ever new sizes
            self._plans.clear()
        plan = self._gpu.plan(NAMES[dtype], elements, layout, weights=self._weights_at, stream=self._stream)
        self._plans[dtype, elements, layout] = plan
        return plan

    def _next_batch(self) -> _Batch:
        if self._batch is not None:
            self.send()
            self._current += 1
        if self._current == len(self._results):
            size = _SLOTS * RESULT.itemsize
            self._results.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        self._batch = _Batch(self, self._results[self._current])
        return self._batch

    def _finish(self, batch: _Batch) -> None:
        if self._pending:
            self._gpu.finish(self._pending, self._partials_at, batch.address, self._stream)
            self._pending.clear()
            self._used = 0


def _first(ticket: CudaTicket) -> CudaTicket:
    """The sighting whose result holds for this one too: itself, if something had changed since the one before."""
    while True:
        ticket.batch.rows()
        if not ticket.batch.unchanged[ticket.number]:
            return ticket
        assert ticket.known is not None
        ticket = ticket.known


def _new_host() -> torch.Tensor:
    return torch.empty(_SLOTS * RESULT.itemsize, dtype=torch.uint8, pin_memory=True)


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
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            tensor = dense(tensor)
        if (index := tensor.get_device()) == torch._C._cuda_getDevice():
            return self._submit(tensor, index, known)
        with torch.cuda.device(index):  # kernels are launched in the context that is current
            return self._submit(tensor, index, known)

    def _submit(self, tensor: torch.Tensor, index: int, known: CudaTicket | None) -> CudaTicket:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        address, layout = tensor.data_ptr(), FLAT
        if address % 16 or not tensor.is_contiguous():
            found = lay_out(tensor.shape, tensor.stride(), tensor.element_size(), address)
            if found is None:
                tensor = tensor.clone(memory_format=torch.contiguous_format)  # it may just begin at an odd place
                address = tensor.data_ptr()
            else:
                layout = found
        stream = torch._C._cuda_getCurrentRawStream(index)
        lane = self._lanes.get((index, stream))
        if lane is None:
            lane = self._lanes[index, stream] = self._open_lane(index, stream)
        return lane.submit(tensor, address, layout, known)

    def parts(self, tensor: torch.Tensor) -> Iterator[Incoming]:
        tensor = dense(tensor)
        index = tensor.get_device()
        if index not in self._sending:
            self._sending[index] = CudaSending(tensor.device)
        yield from self._sending[index].parts(tensor)

    def end_step(self) -> None:
        for lane in self._lanes.values():
            lane.end_step()

    def collect(self, tickets: Sequence[CudaTicket]) -> Collected:
        places: dict[_Batch, list[int]] = {}
        numbers: dict[_Batch, list[int]] = {}
        unchanged = []
        for place, ticket in enumerate(tickets):
            first = _first(ticket)
            unchanged.append(first is not ticket)
            places.setdefault(first.batch, []).append(place)
            numbers.setdefault(first.batch, []).append(first.number)
        results = np.empty(len(tickets), RESULT)
        for batch, where in places.items():
            results[where] = batch.rows()[numbers[batch]]
        for place, ticket in enumerate(tickets):
            if ticket.known is not None and not ticket.probed:
                known = _first(ticket.known)
                unchanged[place] = results["digest"][place] == known.batch.rows()["digest"][known.number]
        elements = np.array([ticket.elements for ticket in tickets], np.int64)
        return Collected(columns(results, elements), unchanged)

    def close(self) -> None:
        for sending in self._sending.values():
            sending.close()
        self._sending.clear()
        self._lanes.clear()

    def _open_lane(self, index: int, stream: int) -> _Lane:
        device = torch.device("cuda", index)
        if index not in self._gpus:
            processors = torch.cuda.get_device_properties(index).multi_processor_count
            capability = torch.cuda.get_device_capability(index)
            gpu = Gpu(Device(index, capability, processors, torch.version.cuda or ""))
            weights = torch.from_numpy(digest_weights().view(np.int32)).to(device)
            torch.cuda.current_stream(index).synchronize()  # other streams read it too
            self._gpus[index] = gpu, weights
        gpu, weights = self._gpus[index]
        return _Lane(gpu, weights, device, stream)
