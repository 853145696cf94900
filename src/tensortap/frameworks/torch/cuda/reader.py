"""Reads CUDA tensors on their device: reads are launched at once or deferred, and summaries arrive later.

Each stream has a lane of its own, in which everything runs in the stream's order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from tensortap.core.host_copies import DeviceBytes
from tensortap.core.interrupts import raise_interrupt
from tensortap.core.placement import Placement
from tensortap.frameworks.device_reader import (
    CollectedSummaries,
    DeferralBound,
    DeferralTrial,
    NativeReads,
    SlotPlacement,
    TensorDescription,
)
from tensortap.frameworks.tensor_kind import TensorKind
from tensortap.frameworks.torch.cuda.host_copies import CudaHostCopies
from tensortap.frameworks.torch.cuda.lane import TOO_LARGE, Lane, limits
from tensortap.frameworks.torch.cuda.results import Batch, CudaTicket, TicketColumns
from tensortap.frameworks.torch.cuda.waiting import WaitingTensor
from tensortap.frameworks.torch.kinds import kind_of
from tensortap.frameworks.torch.memory import StorageHold, describe
from tensortap.frameworks.torch.tensors import PLAIN, dense, is_distributed, is_flat, is_plain_flat
from tensortap.kernels.cuda.driver import PreparedLaunch
from tensortap.kernels.cuda.gpu import BatchRead, Gpu, PieceCounters
from tensortap.kernels.cuda.layout import FLAT, Layout, lay_out
from tensortap.kernels.cuda.parts import Part, part_of
from tensortap.kernels.cuda.results import columns, named_columns, new_columns
from tensortap.kernels.cuda.variants import Device
from tensortap.kernels.summary.reference import digest_weights

__all__ = ["CudaReader"]

_LOOKS_BETWEEN = 24
"""Beginnings of forwards and backwards, and ends of steps, between two looks at the free memory. Each of the first ones
has a look, since the first steps take most of the memory."""


class CudaReader:
    """Reads tensors of any CUDA device and stream. Raises CudaError if kernels cannot be compiled or launched."""

    __slots__ = (
        "_error",
        "_gpus",
        "_host_copies",
        "_lane",
        "_lanes",
        "_looks",
        "_native",
        "_one_stream",
        "_phase",
        "lock",
    )

    hold_tokens = StorageHold

    def __init__(self) -> None:
        self._gpus: dict[int, tuple[Gpu, torch.Tensor]] = {}
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._host_copies: dict[int, CudaHostCopies] = {}
        self.lock: AbstractContextManager[Any] = threading.RLock()  # a backward may end on any thread
        self._one_stream = True
        """Whether no device was seen on two streams. Otherwise nothing is deferred: another stream may get a tensor's
        memory before its deferred read."""
        self._lane: Lane | None = None
        """The lane of the last tensor whose read was deferred."""
        self._native: Any = None
        """The C code that runs most deferred reads."""
        self._phase = -1
        """The backward that is running; -1 outside of one."""
        self._looks = 0
        """How often the free memory might have been looked at."""
        self._error: Exception | None = None

    def describe(self, tensor: torch.Tensor) -> TensorDescription:
        plain = type(tensor) in PLAIN  # runs for every tensor of a step, so it does little
        if not ((plain or not is_distributed(tensor)) and is_flat(tensor)):
            return describe(tensor)
        kind = kind_of(tensor.dtype, tuple(tensor.shape))
        try:
            # A tensor of another class may also be seen as a plain one, and then has the same token.
            # The token starts with another type than other tokens, so it never equals one of them.
            token = kind, tensor._version, tensor.untyped_storage()._cdata, tensor.data_ptr()
        except RuntimeError:  # an inference tensor has no version
            return None, kind, plain
        return token, kind, plain

    def submit(
        self,
        tensor: torch.Tensor,
        known: CudaTicket | None = None,
        flat: bool | None = None,
        placement: Placement | None = None,
    ) -> CudaTicket:
        if flat is None:
            flat = is_plain_flat(tensor)
        if not flat:
            tensor = dense(tensor)
        if (index := tensor.get_device()) == torch._C._cuda_getDevice():
            return self._submit(tensor, flat, index, known, placement)
        with torch.cuda.device(index):  # kernels are launched in the current context
            return self._submit(tensor, flat, index, known, placement)

    def can_place(self, tensor: torch.Tensor, placement: Placement) -> bool:
        tensor = dense(tensor)
        shape = tuple(tensor.shape[at] for at in placement.order) if placement.order else tuple(tensor.shape)
        return part_of(placement, shape, 1 + tensor.is_complex()) is not None

    def base_of(self, tensor: torch.Tensor, placement: Placement) -> int | None:
        if placement.order or tensor.is_complex():
            return None
        part = part_of(placement, tuple(tensor.shape), 1)
        return None if part is None or part.base < 0 or part.elements != part.stored else part.base

    def deferrable(self, tensor: torch.Tensor, likely: TensorKind | None) -> TensorKind | None:
        if torch._C._cuda_isCurrentStreamCapturing() or type(tensor) not in PLAIN:
            return None
        kind = likely
        try:
            if kind is None or tensor.dtype is not kind.dtype or tensor.shape != kind.shape:
                kind = kind_of(tensor.dtype, tuple(tensor.shape))
            address = tensor.data_ptr()
            tensor._version  # noqa: B018 (an inference tensor has none)
            readable = address and not address % 16 and tensor.is_contiguous() and not tensor.is_neg()
        except RuntimeError:  # it has no version, no shape, or no own memory
            return None
        if not readable or kind.dtype.is_complex or kind.nbytes >= TOO_LARGE:
            return None
        with self.lock:
            if (phase := torch._C._current_graph_task_id()) != self._phase:
                self._begin(phase)
            if not self._one_stream or (index := tensor.get_device()) != torch._C._cuda_getDevice():
                return None
            self._lane = self._lanes.get((index, torch._C._cuda_getCurrentRawStream(index)))
            return None if self._lane is None else kind

    def submit_deferred(
        self,
        tensor: torch.Tensor,
        kind: TensorKind,
        bound: DeferralBound,
        known: CudaTicket | None,
        place: SlotPlacement | None = None,
    ) -> CudaTicket:
        assert self._lane is not None, "`deferrable` comes first"
        with self.lock:
            return self._lane.submit_deferred(tensor, kind, bound, known, _base(place))

    def submit_trial(self, tensor: torch.Tensor, trial: DeferralTrial, place: SlotPlacement | None = None) -> None:
        if not is_plain_flat(tensor):
            return
        index = tensor.get_device()
        with self.lock, torch.cuda.device(index):
            if self._one_stream:
                lane = self._lanes[index, torch._C._cuda_getCurrentRawStream(index)]
                lane.submit_trial(tensor, kind_of(tensor.dtype, tuple(tensor.shape)), trial, _base(place))

    def _submit(
        self, tensor: torch.Tensor, flat: bool, index: int, known: CudaTicket | None, placement: Placement | None
    ) -> CudaTicket:
        with self.lock:
            if (phase := torch._C._current_graph_task_id()) != self._phase:
                self._begin(phase)
            stream = torch._C._cuda_getCurrentRawStream(index)
            lane = self._lanes.get((index, stream)) or self._new_lane(index, stream)
            layout: Layout | Part
            if placement is not None:
                tensor, address, layout = _placed(tensor, placement)
            elif flat:
                address, layout = tensor.data_ptr(), FLAT
            else:
                tensor, address, layout = _readable(tensor)
            return lane.submit(tensor, address, layout, known)

    def flush(self) -> None:
        with self.lock:
            if not torch._C._cuda_isCurrentStreamCapturing():
                self._flush()

    def discard_deferred(self) -> None:
        with self.lock:
            for lane in self._lanes.values():
                lane.discard_deferred()

    def _new_lane(self, index: int, stream: int) -> Lane:
        lane = self._lanes[index, stream] = self._open_lane(index, stream)
        if self._native is not None:
            lane.use(self._native)
        if len(self._lanes) != len(self._gpus) and self._one_stream:
            self._one_stream = False
            self._flush()  # includes what was deferred before
        return lane

    def _begin(self, phase: int) -> None:
        """Flush at the start of a forward or backward, also one inside another."""
        self._flush()
        self._phase = phase
        self._fit_into_memory()
        if phase != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._flush_quietly)

    def _fit_into_memory(self) -> None:
        self._looks += 1
        if self._looks < _LOOKS_BETWEEN or not self._looks % _LOOKS_BETWEEN:
            for (index, _), lane in self._lanes.items():
                lane.fit_into(self._free_memory(index))

    def _free_memory(self, index: int) -> int:
        if torch._C._cuda_isCurrentStreamCapturing():
            return 0
        free, _ = torch.cuda.mem_get_info(index)
        return int(free)

    def _flush(self) -> None:
        for (index, _), lane in self._lanes.items():
            with torch.cuda.device(index):
                lane.flush()

    def _flush_quietly(self) -> None:
        """Flush at the end of a backward, which an error must not break."""
        try:
            self.flush()
        except Exception as error:
            raise_interrupt(error)
            self._error = error

    def parts(self, tensor: torch.Tensor) -> Iterator[DeviceBytes]:
        tensor = dense(tensor)
        index = tensor.get_device()
        if index not in self._host_copies:
            self._host_copies[index] = CudaHostCopies(tensor.device)
        yield from self._host_copies[index].parts(tensor)

    def end_step(self) -> None:
        with self.lock:
            if self._error is not None:
                raise self._error
            for lane in self._lanes.values():
                lane.end_step()
            self._fit_into_memory()  # without gradients, no phase begins

    def wait(self, tickets: Sequence[CudaTicket]) -> None:
        for batch in TicketColumns.of(tickets).batches:
            batch.rows()

    def collect(self, *tickets: Sequence[CudaTicket]) -> CollectedSummaries:
        # This competes with the launch of the next step for the interpreter, so it creates no object for each ticket.
        if self._native is not None and (quick := self._collect_natively(list(tickets))) is not None:
            return quick
        found = TicketColumns.joined([TicketColumns.of(each) for each in tickets])
        results, unchanged, missed = found.find_results()
        return CollectedSummaries(columns(results, found.elements), unchanged, np.flatnonzero(missed).tolist())

    def _collect_natively(self, steps: list[Any]) -> CollectedSummaries | None:
        """Collect rows of C code in one call, without the interpreter; None if something about them is unusual."""
        if not all(isinstance(step, self._native.DeviceEntries) for step in steps):
            return None
        batches: list[Batch] = [batch for step in steps for batch in step.batches]
        if any(batch.missed for batch in batches):
            return None
        results = [batch.rows() for batch in batches]
        rows = sum(map(len, steps))
        found = new_columns(rows)
        unchanged = np.empty(rows, bool)
        if not self._native.collect_results(steps, results, *found, unchanged):
            return None
        return CollectedSummaries(named_columns(*found), unchanged)

    @property
    def native_reads(self) -> NativeReads | None:
        classes = CudaReader, Lane, Batch, BatchRead, CudaTicket, PieceCounters, PreparedLaunch, WaitingTensor
        return NativeReads(classes, torch._C, limits())

    def use(self, native: Any) -> None:
        self._native = native
        for lane in self._lanes.values():
            lane.use(native)

    def close(self) -> None:
        for copies in self._host_copies.values():
            copies.close()
        self._host_copies.clear()
        self._lane = None
        self._lanes.clear()

    def _open_lane(self, index: int, stream: int) -> Lane:
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        if index not in self._gpus:
            capability = torch.cuda.get_device_capability(index)
            gpu = Gpu(Device(index, capability, properties.multi_processor_count, torch.version.cuda or ""))
            weights = torch.from_numpy(digest_weights().view(np.int32)).to(device)
            torch.cuda.current_stream(index).synchronize()  # other streams read it, too
            self._gpus[index] = gpu, weights
        gpu, weights = self._gpus[index]
        return Lane(gpu, weights, device, stream, properties.total_memory, self._free_memory(index))


def _base(place: SlotPlacement | None) -> int:
    """Return the row of the whole that the first row of a deferred tensor is."""
    return 0 if place is None or place.base is None else place.base


def _placed(tensor: torch.Tensor, placement: Placement) -> tuple[torch.Tensor, int, Layout | Part]:
    """Return a part of a whole, contiguous and in the whole's order of dimensions, its address and its layout."""
    if placement.order:
        tensor = tensor.permute(placement.order)
    shape, components = tuple(tensor.shape), 1 + tensor.is_complex()
    if components > 1:
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg().contiguous()
    if tensor.data_ptr() % 16:
        tensor = tensor.clone()
    part = part_of(placement, shape, components)
    assert part is not None, "`can_place` comes first"
    if not part.elements:
        tensor = tensor.new_empty(0)
    in_place = part.base == 0 and part.elements == part.stored  # positions in the whole are those in memory
    return tensor, tensor.data_ptr(), FLAT if in_place or not part.elements else part


def _readable(tensor: torch.Tensor) -> tuple[torch.Tensor, int, Layout]:
    """Return a tensor that a kernel can read, its address and its layout."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    address, layout = tensor.data_ptr(), FLAT
    if address % 16 or not tensor.is_contiguous():
        found = lay_out(tensor.shape, tensor.stride(), tensor.element_size(), address)
        if found is None:
            tensor = tensor.clone(memory_format=torch.contiguous_format)  # its start may be unaligned
            address = tensor.data_ptr()
        else:
            layout = found
    return tensor, address, layout
