"""One CUDA stream's summaries: launched in the stream's order, brought to the host a step at a time.

A lane has room for partial results, room for results, and a copy of these to the host for each step. Nothing here waits
for the device unless somebody asks for a summary that has not arrived, and nothing is allocated once the lane has seen
its largest step. Tensors that may wait are read together, in one launch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensortap.frameworks.device_reader import DeferralBound, DeferralTrial
from tensortap.frameworks.torch.cuda.results import SLOTS, Batch, CudaTicket, new_bytes, new_host
from tensortap.frameworks.torch.memory import is_still
from tensortap.frameworks.torch.tensors import NAMES
from tensortap.kernels.cuda.gpu import MOST_TOGETHER, PARTIAL_BYTES, Gpu, Plan, Together, Turns
from tensortap.kernels.cuda.layout import Layout
from tensortap.kernels.cuda.results import RESULT
from tensortap.kernels.cuda.variants import MOST_FINISHED

__all__ = ["TOO_LARGE", "Lane"]

TOO_LARGE = 128 << 20
"""Bytes from which on a tensor is read by itself: a launch of its own is no loss then."""

_PARTIALS = 28 << 20
"""Room for partial results: more than any launch leaves."""
_MOST_PLANS = 4096
_SHARE_WAITING = 192
"""Of the device's memory the part that is seen after a tensor until it is read at the latest: 745 MiB of 140 GiB. The
more are read together, the faster; but what waits is held, also where the program would have let go of it."""
_MOST_WAITING = 1 << 30
"""On any device: more would need more room for partial results."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A tensor that is read together with others."""

    tensor: torch.Tensor
    """Another name for its memory, as in `torch/cuda/backlog.Seen`."""
    elements: int
    address: int
    version: int
    came: int
    """How many tensors the lane had seen, this one included."""
    last: int
    """When it has seen so many, this one must be read."""
    due: int
    """The same in bytes."""
    bound: Any
    """Of one that was put off the `DeferralBound`, of one that is read again the `DeferralTrial`."""

    def is_due(self, came: int, seen: int) -> bool:
        return self.last <= came or self.due <= seen

    def unchanged(self) -> bool:
        return is_still(self.tensor, self.version, self.address)


class Lane:
    """One stream's memory. Everything happens in the stream's order, so it can be used again without waiting."""

    def __init__(self, gpu: Gpu, weights: torch.Tensor, device: torch.device, stream: int, memory: int) -> None:
        """memory: the device's, in bytes."""
        self._gpu = gpu
        self._weights = weights
        self._weights_at = weights.data_ptr()
        self.device = device
        self._stream = stream
        self._partials = new_bytes(_PARTIALS, device=device)
        self._partials_at = self._partials.data_ptr()
        self._most = _PARTIALS // PARTIAL_BYTES
        self._counters = new_bytes(8, device=device)
        self._turns = Turns(self._counters.data_ptr(), stream)
        self._used = 0
        self._pending: list[int] = []
        """Partial results that wait to be added up, as `Gpu.finish` takes them."""
        self._plans: dict[tuple[torch.dtype, int, Layout], Plan] = {}
        self._together: dict[torch.dtype, Together] = {}
        self._waiting: dict[int, _Waiting] = {}
        """Tensors that were put off, by the number of their results."""
        self._trials: list[_Waiting] = []
        """Those that were read at once, to be read again when they would be at the latest."""
        self._came = 0
        """How many tensors came."""
        self._seen = 0
        """The bytes of all of them."""
        self._most_waiting = min(memory // _SHARE_WAITING, _MOST_WAITING)
        """So many bytes are seen after a tensor until it is read at the latest."""
        self._last, self._due = 0, 0
        """None must be read before so many tensors or so many bytes have come."""
        self._results: list[torch.Tensor] = []
        self._current = 0
        """Which of the results is being filled. Earlier ones of a step stay: later sightings look at their probes."""
        # Page-locking memory holds the device up, so enough for the steps under way is locked beforehand.
        self._free = deque(new_host() for _ in range(4))
        self._batch: Batch | None = None

    def submit(
        self,
        tensor: torch.Tensor,
        address: int,
        layout: Layout,
        known: CudaTicket | None,
        later: DeferralBound | None,
    ) -> CudaTicket:
        """With `later`, the tensor is another name for one that may wait."""
        # Called for every tensor of a step, by the thread that launches the step: hence plain numbers where possible.
        batch = self._batch
        if batch is None or batch.size == SLOTS:
            batch = self._batch_with_room(1)
        nbytes = tensor.nbytes
        self._came += 1
        self._seen += nbytes
        if known is not None and known.number in known.batch.missed:
            known = None
        if known is not None and known.batch is batch and known.number in self._waiting:
            ticket = CudaTicket(batch, known.number, known.elements, known)
        elif later is not None and known is None:
            number, elements = batch.size, tensor.numel()
            ticket = CudaTicket(batch, number, elements, None)
            self._waiting[number] = self._defer(tensor, elements, address, later)
            batch.size = number + 1
            if len(self._waiting) == MOST_TOGETHER:
                self._read_waiting()
        else:
            ticket = self._read(tensor, address, layout, known, batch)
        if self._came >= self._last or self._seen >= self._due:
            self._read_what_is_due()
        return ticket

    def pass_over(self, tensor: torch.Tensor) -> None:
        """One that came and cannot be read any more: others have waited for it all the same."""
        self._came += 1
        self._seen += tensor.nbytes
        if self.is_due(0, 0):
            self._read_what_is_due()

    def submit_trial(self, tensor: torch.Tensor, address: int, trial: DeferralTrial) -> None:
        """For one that came just now."""
        if tensor.nbytes < TOO_LARGE:
            self._trials.append(self._defer(tensor.detach(), tensor.numel(), address, trial))

    def is_due(self, count: int, nbytes: int) -> bool:
        """Whether something must be read when so many more tensors have come, of so many bytes."""
        if self._came + count < self._last and self._seen + nbytes < self._due:
            return False
        self._look_when_due()
        return self._came + count >= self._last or self._seen + nbytes >= self._due

    def flush(self) -> None:
        """Read all that waits."""
        self._read_waiting()
        trials, self._trials = self._trials, []
        self._read_trials(trials)

    def discard_deferred(self) -> None:
        """Let go of all that waits, unread."""
        if self._batch is not None:
            self._batch.missed.update(self._waiting)
        self._waiting.clear()
        self._trials.clear()

    def send(self) -> None:
        """Let what was submitted so far travel to the host."""
        batch = self._batch
        if batch is None or not batch.size:
            return
        with torch.cuda.stream(_stream(self._stream, self.device)):
            self._read_waiting()
            self._finish(batch)
            batch.send()
        self._batch = None

    def _defer(
        self, tensor: torch.Tensor, elements: int, address: int, bound: DeferralBound | DeferralTrial
    ) -> _Waiting:
        came, due = self._came, self._seen + self._most_waiting
        last = came + bound.safe_delay
        if last < self._last:
            self._last = last
        return _Waiting(tensor, elements, address, tensor._version, came, last, due, bound)

    def _read(
        self, tensor: torch.Tensor, address: int, layout: Layout, known: CudaTicket | None, batch: Batch
    ) -> CudaTicket:
        elements = tensor.numel()
        kind = tensor.dtype, elements, layout
        plan = self._plans.get(kind) or self._new_plan(*kind)
        if self._used + plan.pieces > self._most or len(self._pending) == 4 * MOST_FINISHED:
            self._finish(batch)
        used, number = self._used, batch.size
        ticket = CudaTicket(batch, number, elements, known)
        expected = known.address if known is not None and ticket.probed else 0
        plan.read(address, self._partials_at + used * PARTIAL_BYTES, ticket.address, expected)
        self._pending += (used, plan.pieces, number, 0)
        self._used = used + plan.pieces
        batch.size = number + 1
        return ticket

    def _read_what_is_due(self) -> None:
        """None waits longer than its place has been tried: what did not change then will not change now."""
        came, seen = self._came, self._seen
        if any(one.is_due(came, seen) for one in self._waiting.values()):
            self._read_waiting()
        if due := [one for one in self._trials if one.is_due(came, seen)]:
            self._trials = [one for one in self._trials if not one.is_due(came, seen)]
            self._read_trials(due)
        self._look_when_due()

    def _look_when_due(self) -> None:
        waiting = [*self._waiting.values(), *self._trials]
        self._last = min((one.last for one in waiting), default=sys.maxsize)
        # Whoever comes later is due later still.
        self._due = min((one.due for one in waiting), default=self._seen + self._most_waiting)

    def _read_waiting(self) -> None:
        if (batch := self._batch) is None:  # then none waits either
            return
        batch.missed.update(self._waiting)  # until they have been read: an interrupt may come at any moment
        waiting, self._waiting = self._waiting, {}
        found = []
        for number, one in waiting.items():
            if one.unchanged():
                found.append((number, one))
            else:
                one.bound.report_changed()
        self._read_together(found, batch)

    def _read_trials(self, trials: Sequence[_Waiting]) -> None:
        for first in range(0, len(trials), MOST_TOGETHER):
            some = trials[first : first + MOST_TOGETHER]
            batch = self._batch_with_room(len(some))
            found = []
            for one in some:
                ticket = CudaTicket(batch, batch.size, one.elements, None) if one.unchanged() else None
                if ticket is not None:
                    found.append((batch.size, one))
                    batch.size += 1
                one.bound.report_second_read(self._came - one.came, ticket)
            self._read_together(found, batch)

    def _read_together(self, waiting: Sequence[tuple[int, _Waiting]], batch: Batch) -> None:
        """With the numbers of their results."""
        batch.missed.update([number for number, _ in waiting])  # until their launch has succeeded
        kinds: dict[torch.dtype, list[tuple[int, _Waiting]]] = {}
        for each in waiting:
            kinds.setdefault(each[1].tensor.dtype, []).append(each)
        for dtype, alike in kinds.items():
            self._launch(self._together.get(dtype) or self._new_together(dtype), alike, batch)

    def _launch(self, together: Together, tensors: Sequence[tuple[int, _Waiting]], batch: Batch) -> None:
        turns = []
        total = 0
        for number, one in tensors:
            elements = one.elements
            share = together.shared_out(elements)
            turns.append((share[1], one.came, number, share, elements, one.address))
            total += share[0]
        # Small pieces last: then nobody waits long for the last one. Else the newest first: it may still be cached.
        turns.sort(reverse=True)
        assert total <= self._most, "far fewer bytes than that wait at a time"
        if self._used + total > self._most or len(self._pending) + 4 * len(turns) > 4 * MOST_FINISHED:
            self._finish(batch)
        works = []
        results = batch.address_of(0)
        for _, _, number, share, elements, address in turns:
            used, self._used = self._used, self._used + share[0]
            room = self._partials_at + used * PARTIAL_BYTES
            works.append((address, elements, share, room, results + number * RESULT.itemsize))
            self._pending += (used, share[0], number, 0)
        together.read(works)
        batch.missed.difference_update([number for number, _ in tensors])

    def end_step(self) -> None:
        self.send()
        self._current = 0

    def _new_plan(self, dtype: torch.dtype, elements: int, layout: Layout) -> Plan:
        if len(self._plans) == _MOST_PLANS:  # tensors of ever new sizes
            self._plans.clear()
        plan = self._gpu.plan(
            NAMES[dtype], elements, layout, weights=self._weights_at, turns=self._turns, stream=self._stream
        )
        self._plans[dtype, elements, layout] = plan
        return plan

    def _new_together(self, dtype: torch.dtype) -> Together:
        together = self._gpu.together(NAMES[dtype], weights=self._weights_at, turns=self._turns, stream=self._stream)
        self._together[dtype] = together
        return together

    def _batch_with_room(self, count: int) -> Batch:
        batch = self._batch
        if batch is not None and batch.size + count <= SLOTS:
            return batch
        if batch is not None:
            self.send()
            self._current += 1
        if self._current == len(self._results):
            size = SLOTS * RESULT.itemsize
            self._results.append(new_bytes(size, device=self.device))
        self._batch = Batch(self, self._results[self._current], self._free)
        return self._batch

    def _finish(self, batch: Batch) -> None:
        if self._pending:
            self._gpu.finish(self._pending, self._partials_at, batch.address_of(0), self._stream)
            self._pending.clear()
            self._used = 0


def _stream(raw: int, device: torch.device) -> Any:
    # ExternalStream takes 0, the default stream, for the wish for a new one.
    return torch.cuda.ExternalStream(raw, device) if raw else torch.cuda.default_stream(device)
