"""The summaries of one CUDA stream: launched in the stream's order, and copied to the host once a step.

A lane has memory for partial results, memory for results, and a copy of these to the host for each step. Nothing waits
for the device until a summary is requested that has not arrived. Nothing is allocated once the lane has seen its
largest step. Deferred tensors are read together, in one launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensortap.frameworks.device_reader import DeferralBound, DeferralTrial
from tensortap.frameworks.tensor_kind import TensorKind
from tensortap.frameworks.torch.cuda.results import SLOTS, Batch, CudaTicket, new_bytes, new_host
from tensortap.frameworks.torch.cuda.waiting import WaitingTensor, WaitingTensors
from tensortap.frameworks.torch.tensors import NAMES
from tensortap.kernels.cuda.gpu import (
    MOST_TOGETHER,
    PARTIAL_BYTES,
    PENDING,
    PROBE_OFFSET,
    BatchRead,
    Gpu,
    PartPlan,
    PieceCounters,
    ReadPlan,
)
from tensortap.kernels.cuda.layout import Layout
from tensortap.kernels.cuda.parts import Part
from tensortap.kernels.cuda.results import RESULT
from tensortap.kernels.cuda.variants import MOST_FINISHED

__all__ = ["TOO_LARGE", "Lane", "limits"]

TOO_LARGE = 128 << 20
"""Size in bytes from which a tensor gets a launch of its own, which costs nothing then."""

_PARTIALS = 32 << 20
"""Bytes for partial results: more than any launch produces."""
_MOST_PLANS = 4096
_SHARE_WAITING = 192
"""Divisor of the device's memory for the bytes that may come before a deferred read runs: 745 MiB of 140 GiB. Larger
launches are faster, but waiting tensors are held although the program may have freed them."""
_SHARE_FREE = 16
"""The same divisor for memory that nothing has taken."""
_MOST_WAITING = 9 << 28
"""Upper bound on both. More would need more memory for partial results."""


class Lane:
    """The memory of one stream. Everything runs in the stream's order, so memory is reused without waiting.

    `native/deferred.h` has `submit_deferred` in C, and `native/launches.h` has `_read_waiting`.
    """

    __slots__ = (
        "_batch",
        "_counters",
        "_current",
        "_free",
        "_gpu",
        "_launch_waiting",
        "_least",
        "_most",
        "_partials",
        "_partials_at",
        "_pending",
        "_plans",
        "_results",
        "_sent",
        "_stream",
        "_together",
        "_trials",
        "_turns",
        "_used",
        "_waiting",
        "_weights",
        "_weights_at",
        "device",
        "index",
    )

    def __init__(
        self, gpu: Gpu, weights: torch.Tensor, device: torch.device, stream: int, memory: int, free: int
    ) -> None:
        """Allocate the memory. `memory` is that of the device, in bytes, and `free` what nothing has taken of it."""
        self._gpu = gpu
        self._weights = weights
        self._weights_at = weights.data_ptr()
        self.device = device
        self.index: int = weights.get_device()
        """The number of the device, as of its tensors."""
        self._launch_waiting: Callable[[Lane], bool] = lambda _: False
        """Runs `_read_waiting` in C, if it can, and returns whether it did."""
        self._stream = stream
        self._partials = new_bytes(_PARTIALS, device=device)
        self._partials_at = self._partials.data_ptr()
        self._most = _PARTIALS // PARTIAL_BYTES
        self._counters = new_bytes(8, device=device)
        self._turns = PieceCounters(self._counters.data_ptr(), stream)
        self._used = 0
        self._pending = bytearray()
        """Partial results to be summed, as `Gpu.finish` takes them."""
        self._plans: dict[tuple[torch.dtype, int, Layout | Part], ReadPlan | PartPlan] = {}
        self._together: dict[tuple[torch.dtype, bool], BatchRead] = {}
        """The launches for tensors of a dtype, and for those that begin at another row of a whole."""
        self._least = memory // _SHARE_WAITING
        self._waiting = WaitingTensors(self._most_waiting(free))
        self._trials: list[WaitingTensor] = []
        """Tensors that were read at once, and are read again as late as a deferred read may run."""
        self._results: list[torch.Tensor] = []
        self._current = 0
        """Index of the results being filled. Earlier ones of a step stay, because later sightings use their probes."""
        # Page-locking memory stalls the device, so enough for the steps that are written together is locked in advance.
        self._free = deque(new_host() for _ in range(10))
        self._batch: Batch | None = None
        self._sent: deque[Batch] = deque()
        """Batches that may not have arrived at the host yet."""

    def use(self, native: Any) -> None:
        """Let C code run most deferred reads."""
        self._launch_waiting = native.read_waiting
        before = self._waiting
        if not len(before):
            self._waiting = native.WaitingTensors(before.most)
            for count in ("came", "seen", "last", "due"):
                setattr(self._waiting, count, getattr(before, count))

    def fit_into(self, free: int) -> None:
        """Let as many bytes wait from now on as the free memory allows."""
        waiting = self._waiting
        waiting.most = self._most_waiting(free)
        waiting.due = min(waiting.due, waiting.seen + waiting.most)

    def submit(
        self,
        tensor: torch.Tensor,
        address: int,
        layout: Layout | Part,
        known: CudaTicket | None,
    ) -> CudaTicket:
        """Summarise a tensor, and return its ticket. The layout of a tensor that is part of a whole is its `Part`."""
        batch = self._batch
        if batch is None or batch.size == SLOTS:
            batch = self._batch_with_room(1)
        self._waiting.came += 1
        self._waiting.seen += tensor.nbytes
        if known is not None and known.number in known.batch.missed:
            known = None
        if known is not None and known.batch is batch and known.number in self._waiting:
            ticket = CudaTicket(batch, known.number, known.elements, known)
        else:
            ticket = self._read(tensor, address, layout, known, batch)
        if self._waiting.came >= self._waiting.last or self._waiting.seen >= self._waiting.due:
            self._read_due()
        return ticket

    def submit_deferred(
        self, tensor: torch.Tensor, kind: TensorKind, bound: DeferralBound, known: CudaTicket | None, base: int = 0
    ) -> CudaTicket:
        """Summarise a flat tensor whose read may be deferred, and return its ticket. If it is known, it is not read.

        `base` is the row of a whole that its first row is.
        """
        batch = self._batch
        if batch is None or batch.size == SLOTS:
            batch = self._batch_with_room(1)
        self._waiting.came += 1
        self._waiting.seen += kind.nbytes
        if known is not None and known.number not in known.batch.missed:
            ticket = CudaTicket(known.batch, known.number, kind.elements, known)
        else:
            number = batch.size
            ticket = CudaTicket(batch, number, kind.elements, None)
            self._waiting.add(number, self._defer(tensor, kind, bound, base))
            batch.size = number + 1
            if len(self._waiting) == MOST_TOGETHER:
                self._read_waiting()
        if self._waiting.came >= self._waiting.last or self._waiting.seen >= self._waiting.due:
            self._read_due()
        return ticket

    def submit_trial(self, tensor: torch.Tensor, kind: TensorKind, trial: DeferralTrial, base: int = 0) -> None:
        """Read the newest tensor again later."""
        if kind.nbytes < TOO_LARGE:
            self._trials.append(self._defer(tensor, kind, trial, base))

    def flush(self) -> None:
        """Run all deferred reads."""
        while self._sent and self._sent[0].has_arrived():
            self._sent.popleft()
        self._read_waiting()
        trials, self._trials = self._trials, []
        self._read_trials(trials)

    def discard_deferred(self) -> None:
        """Release all deferred tensors, unread."""
        if self._batch is not None:
            self._batch.missed.update(self._waiting.numbers())
        self._waiting.clear()
        self._trials.clear()

    def send(self) -> None:
        """Start to copy all results so far to the host."""
        batch = self._batch
        if batch is None or not batch.size:
            return
        with torch.cuda.stream(_stream(self._stream, self.device)):
            self._read_waiting()
            self._finish(batch)
            batch.send()
        self._sent.append(batch)
        self._batch = None

    def _most_waiting(self, free: int) -> int:
        return min(max(self._least, free // _SHARE_FREE), _MOST_WAITING)

    def _defer(
        self, tensor: torch.Tensor, kind: TensorKind, bound: DeferralBound | DeferralTrial, base: int
    ) -> WaitingTensor:
        came, due = self._waiting.came, self._waiting.seen + self._waiting.most
        last = came + bound.safe_delay
        if last < self._waiting.last:
            self._waiting.last = last
        alias = tensor.detach()
        # Below autograd, as in compiled code, it may have a version of its own.
        return WaitingTensor(alias, kind, alias.data_ptr(), alias._version, came, last, due, bound, base)

    def _read(
        self, tensor: torch.Tensor, address: int, layout: Layout | Part, known: CudaTicket | None, batch: Batch
    ) -> CudaTicket:
        elements = layout.elements if type(layout) is Part else tensor.numel()
        kind = tensor.dtype, elements, layout
        plan = self._plans.get(kind) or self._new_plan(*kind)
        if self._used + plan.pieces > self._most or len(self._pending) == PENDING.size * MOST_FINISHED:
            self._finish(batch)
        used, number = self._used, batch.size
        ticket = CudaTicket(batch, number, elements, known)
        expected = known.address if known is not None and ticket.probed else 0
        plan.read(address, self._partials_at + used * PARTIAL_BYTES, ticket.address, expected)
        self._pending += PENDING.pack(used, plan.pieces, number, 0)
        self._used = used + plan.pieces
        batch.size = number + 1
        return ticket

    def _read_due(self) -> None:
        """Read the tensors that are due. None waits longer than in its trial, during which it did not change."""
        came, seen = self._waiting.came, self._waiting.seen
        last, due = self._waiting.bounds()
        if last <= came or due <= seen:
            self._read_waiting()
        if trials := [one for one in self._trials if one.is_due(came, seen)]:
            self._trials = [one for one in self._trials if not one.is_due(came, seen)]
            self._read_trials(trials)
        self._update_due()

    def _update_due(self) -> None:
        last, due = self._waiting.bounds()
        # Later tensors are due even later.
        self._waiting.last = min([last, *(one.last for one in self._trials)])
        self._waiting.due = min([due, self._waiting.seen + self._waiting.most, *(one.due for one in self._trials)])

    def _read_waiting(self) -> None:
        if (batch := self._batch) is None or self._launch_waiting(self):  # without a batch, nothing waits either
            return
        batch.missed.update(self._waiting.numbers())  # until they are read: an interrupt may come at any moment
        found = []
        for number, one in self._waiting.take_all():
            if one.unchanged():
                found.append((number, one))
            else:
                one.bound.report_changed()
        self._read_together(found, batch)

    def _read_trials(self, trials: Sequence[WaitingTensor]) -> None:
        for first in range(0, len(trials), MOST_TOGETHER):
            some = trials[first : first + MOST_TOGETHER]
            batch = self._batch_with_room(len(some))
            found = []
            for one in some:
                ticket = CudaTicket(batch, batch.size, one.kind.elements, None) if one.unchanged() else None
                if ticket is not None:
                    found.append((batch.size, one))
                    batch.size += 1
                one.bound.report_second_read(self._waiting.came - one.came, ticket)
            self._read_together(found, batch)

    def _read_together(self, waiting: Sequence[tuple[int, WaitingTensor]], batch: Batch) -> None:
        """Read tensors in one launch per dtype; each comes with the number of its result."""
        batch.missed.update([number for number, _ in waiting])  # until their launch has succeeded
        kinds: dict[torch.dtype, list[tuple[int, WaitingTensor]]] = {}
        for each in waiting:
            kinds.setdefault(each[1].kind.dtype, []).append(each)
        for dtype, alike in kinds.items():
            kind = dtype, any(one.base for _, one in alike)
            self._launch(self._together.get(kind) or self._new_together(*kind), alike, batch)

    def _launch(self, together: BatchRead, tensors: Sequence[tuple[int, WaitingTensor]], batch: Batch) -> None:
        turns = []
        total = 0
        for number, one in tensors:
            elements = one.kind.elements
            share = together.shared_out(elements)
            turns.append((share[1], one.came, number, share, elements, one.address, one.base))
            total += share[0]
        # Small pieces last, so that the launch ends evenly. Otherwise the newest first: it may still be cached.
        turns.sort(reverse=True)
        assert total <= self._most, "far fewer bytes than that wait at a time"
        if self._used + total > self._most or len(self._pending) // PENDING.size + len(turns) > MOST_FINISHED:
            self._finish(batch)
        works = []
        results = batch.address_of(0)
        for _, _, number, share, elements, address, base in turns:
            used, self._used = self._used, self._used + share[0]
            room = self._partials_at + used * PARTIAL_BYTES
            works.append((address, elements, share, room, results + number * RESULT.itemsize, base))
            self._pending += PENDING.pack(used, share[0], number, 0)
        together.read(works)
        batch.missed.difference_update([number for number, _ in tensors])

    def end_step(self) -> None:
        self.send()
        self._current = 0

    def _new_plan(self, dtype: torch.dtype, elements: int, layout: Layout | Part) -> ReadPlan | PartPlan:
        if len(self._plans) == _MOST_PLANS:  # tensor sizes keep changing
            self._plans.clear()
        memory: Any = {"weights": self._weights_at, "turns": self._turns, "stream": self._stream}
        plan: ReadPlan | PartPlan
        if isinstance(layout, Part):
            plan = self._gpu.plan_part(NAMES[dtype], layout, **memory)
        else:
            plan = self._gpu.plan(NAMES[dtype], elements, layout, **memory)
        self._plans[dtype, elements, layout] = plan
        return plan

    def _new_together(self, dtype: torch.dtype, placed: bool) -> BatchRead:
        memory: Any = {"weights": self._weights_at, "turns": self._turns, "stream": self._stream}
        together = self._together[dtype, placed] = self._gpu.together(NAMES[dtype], placed, **memory)
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


def limits() -> tuple[int, ...]:
    """Return limits and sizes for the C code, in the order that `configure_device` takes them.

    These are the bytes from which a tensor is read alone, and the numbers of tensors in a launch and of results in a
    batch. They are followed by the bytes of a partial result and of a result, the position of its probe, and the number
    of tensors whose partial results are added up at once.
    """
    return TOO_LARGE, MOST_TOGETHER, SLOTS, PARTIAL_BYTES, RESULT.itemsize, PROBE_OFFSET, MOST_FINISHED


def _stream(raw: int, device: torch.device) -> Any:
    # ExternalStream treats 0, the default stream, as a request for a new one.
    return torch.cuda.ExternalStream(raw, device) if raw else torch.cuda.default_stream(device)
