"""One CUDA stream's summaries: launched in the stream's order, brought to the host a step at a time.

A lane has room for partial results, room for results, and a copy of these to the host for each step. Nothing here waits
for the device unless somebody asks for a summary that has not arrived, and nothing is allocated once the lane has seen
its largest step. Tensors that may wait are read together, in one launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from tensortap.frameworks.torch_tensors import NAMES
from tensortap.kernels.cuda import driver
from tensortap.kernels.gpu import (
    MOST_FINISHED,
    MOST_TOGETHER,
    PARTIAL_BYTES,
    RESULT,
    Gpu,
    Layout,
    Plan,
    Together,
)

__all__ = ["Batch", "CudaTicket", "Lane", "first_sighting"]

_SLOTS = 1024
_PARTIALS = 28 << 20
_RESULT_BYTES = RESULT.itemsize
_MOST_PLANS = 4096
_MOST_WAITING = 384 << 20
"""Bytes that are seen until those that wait are read."""
_TOO_LARGE = 128 << 20
"""For such a tensor a launch of its own is no loss."""


class _Waiting(NamedTuple):
    """A tensor that is read together with others."""

    tensor: torch.Tensor
    """Another name for its memory: the tensor itself would keep its graph alive, and have gradients copied."""
    address: int
    version: int
    elements: int
    number: int
    """Of its result."""


class CudaTicket(NamedTuple):
    """A summary that is on its way."""

    batch: Batch
    number: int
    """Its place in the batch."""
    elements: int
    known: CudaTicket | None
    """An earlier sighting; with the same place, if that was still waiting to be read."""

    @property
    def address(self) -> int:
        """Of its result on the device, while the step lasts."""
        return self.batch.address + self.number * _RESULT_BYTES

    @property
    def probed(self) -> bool:
        """Whether a few elements were compared with `known` first; if not, all were read. In another stream `known` may
        not have been finished yet."""
        return self.known is not None and self.known.batch.lane is self.batch.lane


class Batch:
    """Results that travel together."""

    def __init__(self, lane: Lane, results: torch.Tensor) -> None:
        self.lane = lane
        self.size = 0
        """So many have been submitted."""
        self.address: int = results.data_ptr()
        self._results = results
        self._host: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._rows: npt.NDArray[Any] | None = None
        self.unchanged: list[bool] = []
        self.missed: set[int] = set()
        """Those that were changed before they were read."""

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


class Lane:
    """One stream's memory. Everything happens in the stream's order, so it can be used again without waiting."""

    def __init__(self, gpu: Gpu, weights: torch.Tensor, device: torch.device, stream: int) -> None:
        self._gpu = gpu
        self._weights = weights
        self._weights_at = weights.data_ptr()
        self._device = device
        self._stream = stream
        room = max(_PARTIALS, MOST_TOGETHER * gpu.most_blocks * PARTIAL_BYTES)
        self._partials = torch.empty(room, dtype=torch.uint8, device=device)
        self._partials_at = self._partials.data_ptr()
        self._most = self._partials.numel() // PARTIAL_BYTES
        self._used = 0
        self._pending: list[int] = []
        """Partial results that wait to be added up, as `Gpu.finish` takes them."""
        self._plans: dict[tuple[torch.dtype, int, Layout], Plan] = {}
        self._together: dict[torch.dtype, Together] = {}
        self._waiting: dict[int, _Waiting] = {}
        """By the number of its result."""
        self._seen = 0
        """Bytes that were seen since the oldest of them."""
        self._results: list[torch.Tensor] = []
        self._current = 0
        """Which of the results is being filled. Earlier ones of a step stay: later sightings look at their probes."""
        # Page-locking memory holds the device up, so enough for the steps under way is locked beforehand.
        self._free = deque(_new_host() for _ in range(4))
        self._batch: Batch | None = None

    def submit(
        self, tensor: torch.Tensor, address: int, layout: Layout, known: CudaTicket | None, later: bool
    ) -> CudaTicket:
        # Called for every tensor of a step, by the thread that launches the step: hence plain numbers where possible.
        batch = self._batch
        if batch is None or batch.size == _SLOTS:
            batch = self._next_batch()
        elements = tensor.numel()
        if known is not None:
            if known.batch is batch and known.number in self._waiting:
                return CudaTicket(batch, known.number, elements, known)
            if known.number in known.batch.missed:
                known = None
        if self._waiting or later:
            nbytes = elements * tensor.element_size()
            self._seen += nbytes
            if later and known is None and nbytes < _TOO_LARGE:
                number = batch.size
                self._waiting[number] = _Waiting(tensor.detach(), address, tensor._version, elements, number)
                batch.size = number + 1
                if self._seen >= _MOST_WAITING or len(self._waiting) == MOST_TOGETHER:
                    self.settle()
                return CudaTicket(batch, number, elements, known)
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

    def settle(self) -> None:
        """Read what waits."""
        batch = self._batch
        self._seen = 0
        if batch is None or not self._waiting:
            return
        steady: dict[torch.dtype, list[_Waiting]] = {}
        for waiting in self._waiting.values():
            tensor = waiting.tensor
            if tensor._version == waiting.version and tensor.data_ptr() == waiting.address:
                steady.setdefault(tensor.dtype, []).append(waiting)
            else:
                batch.missed.add(waiting.number)
        for dtype, tensors in steady.items():
            self._read_together(self._together.get(dtype) or self._new_together(dtype), tensors, batch)
        self._waiting.clear()

    def _read_together(self, together: Together, tensors: Sequence[_Waiting], batch: Batch) -> None:
        most = len(tensors) * self._gpu.most_blocks
        if self._used + most > self._most or len(self._pending) + 4 * len(tensors) > 4 * MOST_FINISHED:
            self._finish(batch)
        works = []
        for waiting in reversed(tensors):  # the newest may still lie in the cache
            used, blocks = self._used, together.blocks(waiting.elements)
            result = batch.address + waiting.number * _RESULT_BYTES
            works.append((waiting.address, waiting.elements, self._partials_at + used * PARTIAL_BYTES, result))
            self._pending += (used, blocks, waiting.number, 0)
            self._used = used + blocks
        together.read(works)

    def send(self) -> None:
        """Let what was submitted so far travel to the host."""
        self.settle()
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

    def _new_together(self, dtype: torch.dtype) -> Together:
        together = self._gpu.together(NAMES[dtype], weights=self._weights_at, stream=self._stream)
        self._together[dtype] = together
        return together

    def _next_batch(self) -> Batch:
        if self._batch is not None:
            self.send()
            self._current += 1
        if self._current == len(self._results):
            size = _SLOTS * RESULT.itemsize
            self._results.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        self._batch = Batch(self, self._results[self._current])
        return self._batch

    def _finish(self, batch: Batch) -> None:
        if self._pending:
            self._gpu.finish(self._pending, self._partials_at, batch.address, self._stream)
            self._pending.clear()
            self._used = 0


def first_sighting(ticket: CudaTicket) -> CudaTicket:
    """The sighting whose result holds for this one too: itself, if something had changed since the one before."""
    while True:
        batch, known = ticket.batch, ticket.known
        batch.rows()
        if known is not None and known.batch is batch and known.number == ticket.number:
            ticket = known
        elif known is None or ticket.number in batch.missed or not batch.unchanged[ticket.number]:
            return ticket
        else:
            ticket = known


def _new_host() -> torch.Tensor:
    return torch.empty(_SLOTS * RESULT.itemsize, dtype=torch.uint8, pin_memory=True)


def _stream(raw: int, device: torch.device) -> Any:
    # ExternalStream takes 0, the default stream, for the wish for a new one.
    return torch.cuda.ExternalStream(raw, device) if raw else torch.cuda.default_stream(device)
