"""One CUDA stream's summaries: launched in the stream's order, brought to the host a step at a time.

A lane has room for partial results, room for results, and a copy of these to the host for each step. Nothing here waits
for the device unless somebody asks for a summary that has not arrived, and nothing is allocated once the lane has seen
its largest step. Tensors that may wait are read together, in one launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
"""So many bytes are seen after a tensor until it is read at the latest."""


class _Waiting(NamedTuple):
    """A tensor that is read together with others."""

    tensor: torch.Tensor
    """Another name for its memory: the tensor itself would keep its graph alive, and have gradients copied."""
    address: int
    version: int
    elements: int
    due: int
    """When the lane has seen so many bytes, it must be read."""
    lost: Callable[[], None] | None
    """Whom to tell if it has been changed."""


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
        self._partials = _new_bytes(room, device=device)
        self._partials_at = self._partials.data_ptr()
        self._most = self._partials.numel() // PARTIAL_BYTES
        self._used = 0
        self._pending: list[int] = []
        """Partial results that wait to be added up, as `Gpu.finish` takes them."""
        self._plans: dict[tuple[torch.dtype, int, Layout], Plan] = {}
        self._together: dict[torch.dtype, Together] = {}
        self._waiting: dict[int, _Waiting] = {}
        """Tensors that were put off, by the number of their results; the oldest comes first."""
        self._trials: dict[int, _Waiting] = {}
        """Those that were read at once, to be read again when they would be at the latest."""
        self._seen = 0
        """Bytes of all tensors that came."""
        self._due = 0
        """None must be read before so many have come."""
        self._results: list[torch.Tensor] = []
        self._current = 0
        """Which of the results is being filled. Earlier ones of a step stay: later sightings look at their probes."""
        # Page-locking memory holds the device up, so enough for the steps under way is locked beforehand.
        self._free = deque(_new_host() for _ in range(4))
        self._batch: Batch | None = None

    def submit(
        self,
        tensor: torch.Tensor,
        address: int,
        layout: Layout,
        known: CudaTicket | None,
        later: Callable[[], None] | None,
    ) -> CudaTicket:
        # Called for every tensor of a step, by the thread that launches the step: hence plain numbers where possible.
        batch = self._batch
        if batch is None or batch.size == _SLOTS:
            batch = self._next_batch()
        elements = tensor.numel()
        self._seen += elements * tensor.element_size()
        if known is not None and known.number in known.batch.missed:
            known = None
        if known is not None and known.batch is batch and known.number in self._waiting:
            ticket = CudaTicket(batch, known.number, elements, known)
        elif later is not None and known is None:
            ticket = self._put_off(self._waiting, tensor, address, later, batch)
            if len(self._waiting) == MOST_TOGETHER:
                self._read_together(self._waiting, batch)
        else:
            ticket = self._read(tensor, address, layout, known, batch)
        if self._seen >= self._due:
            self._read_what_is_due(batch)
        return ticket

    def submit_again(self, tensor: torch.Tensor, address: int) -> CudaTicket:
        """As `submit`, for one that came just now."""
        batch = self._batch
        if batch is None or batch.size == _SLOTS:
            batch = self._next_batch()
        return self._put_off(self._trials, tensor, address, None, batch)

    def settle(self) -> None:
        """Read all that waits."""
        if self._batch is not None:
            self._read_together(self._waiting, self._batch)
            self._read_together(self._trials, self._batch)

    def forget(self) -> None:
        """Let go of all that waits, unread."""
        if self._batch is not None:
            self._batch.missed.update(self._waiting, self._trials)
        self._waiting.clear()
        self._trials.clear()

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
            self._read_together(self._waiting, batch)
            batch.missed.update(self._trials)  # too early for these to prove anything
            self._trials.clear()
            self._finish(batch)
            batch.send(host)
        self._batch = None

    def _put_off(
        self,
        among: dict[int, _Waiting],
        tensor: torch.Tensor,
        address: int,
        lost: Callable[[], None] | None,
        batch: Batch,
    ) -> CudaTicket:
        number, elements = batch.size, tensor.numel()
        due = self._seen + _MOST_WAITING
        among[number] = _Waiting(tensor.detach(), address, tensor._version, elements, due, lost)
        batch.size = number + 1
        return CudaTicket(batch, number, elements, None)

    def _read(
        self, tensor: torch.Tensor, address: int, layout: Layout, known: CudaTicket | None, batch: Batch
    ) -> CudaTicket:
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

    def _read_what_is_due(self, batch: Batch) -> None:
        """None waits longer in `_waiting`, where the oldest takes all others along, than in `_trials`: what did not
        change there will not change here."""
        if any(one.due <= self._seen for one in self._waiting.values()):
            self._read_together(self._waiting, batch)
        if old := {number: one for number, one in self._trials.items() if one.due <= self._seen}:
            for number in old:
                del self._trials[number]
            self._read_together(old, batch)
        # Whoever comes later is due later still.
        dues = (one.due for waiting in (self._waiting, self._trials) for one in waiting.values())
        self._due = min(dues, default=self._seen + _MOST_WAITING)

    def _read_together(self, waiting: dict[int, _Waiting], batch: Batch) -> None:
        """Those that have not changed. None of them waits any longer."""
        found: dict[torch.dtype, list[tuple[int, _Waiting]]] = {}
        batch.missed.update(waiting)  # until their launches have succeeded
        for number, one in waiting.items():
            tensor = one.tensor
            if tensor._version == one.version and tensor.data_ptr() == one.address:
                found.setdefault(tensor.dtype, []).append((number, one))
            elif one.lost is not None:
                one.lost()
        waiting.clear()
        for dtype, tensors in found.items():
            together = self._together.get(dtype) or self._new_together(dtype)
            tensors.reverse()  # the newest may still lie in the cache
            for first in range(0, len(tensors), MOST_TOGETHER):
                self._launch(together, tensors[first : first + MOST_TOGETHER], batch)

    def _launch(self, together: Together, tensors: Sequence[tuple[int, _Waiting]], batch: Batch) -> None:
        most = len(tensors) * self._gpu.most_blocks
        if self._used + most > self._most or len(self._pending) + 4 * len(tensors) > 4 * MOST_FINISHED:
            self._finish(batch)
        works = []
        for number, one in tensors:
            used, blocks = self._used, together.blocks(one.elements)
            partials, result = self._partials_at + used * PARTIAL_BYTES, batch.address + number * _RESULT_BYTES
            works.append((one.address, one.elements, partials, result))
            self._pending += (used, blocks, number, 0)
            self._used = used + blocks
        together.read(works)
        batch.missed.difference_update(number for number, _ in tensors)

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
            self._results.append(_new_bytes(size, device=self._device))
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
        elif known is None or not batch.unchanged[ticket.number]:
            return ticket
        else:
            ticket = known


def _new_host() -> torch.Tensor:
    return _new_bytes(_SLOTS * RESULT.itemsize, pin_memory=True)


def _new_bytes(count: int, **where: Any) -> torch.Tensor:
    with torch.inference_mode(False):  # the model may run in it now, and outside of it later
        return torch.empty(count, dtype=torch.uint8, **where)


def _stream(raw: int, device: torch.device) -> Any:
    # ExternalStream takes 0, the default stream, for the wish for a new one.
    return torch.cuda.ExternalStream(raw, device) if raw else torch.cuda.default_stream(device)
