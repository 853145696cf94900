"""Reads CUDA tensors on their device: reads are launched at once or deferred, and summaries arrive later.

Each stream has a lane of its own, in which everything runs in the stream's order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensortap.core.host_copies import DeviceBytes
from tensortap.core.interrupts import raise_interrupt
from tensortap.core.placement import Placement
from tensortap.frameworks.device_reader import (
    CollectedSummaries,
    DeferralBound,
    DeferralTrial,
    DeferredSlot,
    NativeReads,
    ReadDeferred,
    SlotPlacement,
    TensorDescription,
)
from tensortap.frameworks.tensor_kind import TensorKind
from tensortap.frameworks.torch.cuda.deferred import DeferredReads
from tensortap.frameworks.torch.cuda.host_copies import CudaHostCopies
from tensortap.frameworks.torch.cuda.lane import Lane, WaitingTensor, limits
from tensortap.frameworks.torch.cuda.results import Batch, CudaTicket, first_sighting
from tensortap.frameworks.torch.memory import StorageHold, describe
from tensortap.frameworks.torch.tensors import NAMES, PLAIN, dense, is_distributed, is_flat, is_plain_flat
from tensortap.kernels.cuda.gpu import BatchRead, Gpu
from tensortap.kernels.cuda.layout import FLAT, Layout, lay_out
from tensortap.kernels.cuda.parts import Part, part_of
from tensortap.kernels.cuda.results import RESULT, columns
from tensortap.kernels.cuda.variants import Device
from tensortap.kernels.summary.reference import digest_weights

__all__ = ["CudaReader"]


class CudaReader:
    """Reads tensors of any CUDA device and stream. Raises CudaError if kernels cannot be compiled or launched."""

    __slots__ = (
        "_address",
        "_deferred",
        "_error",
        "_gpus",
        "_host_copies",
        "_lanes",
        "_one_stream",
        "_phase",
        "_reading",
        "lock",
        "read_deferred",
        "read_many",
        "read_waiting",
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
        self._deferred: DeferredReads | None = None
        """Reads of one stream at a time, because records have an order."""
        self.read_deferred: ReadDeferred = lambda *_: None
        self.read_many: Callable[[DeferredReads], None] = lambda _: None
        self.read_waiting: Callable[[Lane], bool] = lambda _: False
        self._reading = False
        """Whether deferred reads are running."""
        self._address = 0
        """Where the tensor is whose deferred read is running."""
        self._phase = -1
        """The backward that is running; -1 outside of one."""
        self._error: Exception | None = None

    def describe(self, tensor: torch.Tensor) -> TensorDescription:
        plain = type(tensor) in PLAIN  # runs for every tensor of a step, so it does little
        if not ((plain or not is_distributed(tensor)) and is_flat(tensor)):
            return describe(tensor)
        dtype = tensor.dtype
        try:
            # A tensor of another class may also be seen as a plain one, and then has the same token.
            # The token starts with another type than other tokens, so it never equals one of them.
            token = dtype, tensor._version, tensor.untyped_storage()._cdata, tensor.storage_offset(), *tensor.shape
        except RuntimeError:  # an inference tensor has no version
            return None, NAMES[dtype], tuple(tensor.shape), plain
        return token, NAMES[dtype], token[4:], plain

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

    def submit_deferred(
        self,
        alias: torch.Tensor,
        kind: TensorKind,
        bound: DeferralBound,
        known: CudaTicket | None,
        place: SlotPlacement | None = None,
    ) -> CudaTicket:
        assert self._deferred is not None
        return self._deferred.lane.submit_deferred(alias, kind, self._address, bound, known, _base(place))

    def defer(
        self,
        tensor: torch.Tensor,
        bound: DeferralBound,
        slot: DeferredSlot,
        step: int,
        place: SlotPlacement | None = None,
    ) -> bool:
        if torch._C._cuda_isCurrentStreamCapturing():
            return False
        with self.lock:
            if (phase := torch._C._current_graph_task_id()) != self._phase:
                self._begin(phase)
            if not self._one_stream or (index := tensor.get_device()) != torch._C._cuda_getDevice():
                return False
            stream = torch._C._cuda_getCurrentRawStream(index)
            lane = self._lanes.get((index, stream))
            if lane is None:
                return False
            if (deferred := self._deferred) is None or deferred.lane is not lane:
                self._run_deferred()
                deferred = self._deferred = DeferredReads(lane, index, stream)
            taken = deferred.add(tensor, bound, slot, step, place)
            if deferred.is_due:
                self._run_deferred()
            return taken

    def run_deferred(self) -> None:
        with self.lock:
            if self._deferred and not torch._C._cuda_isCurrentStreamCapturing():
                self._run_deferred()

    def submit_trial(self, tensor: torch.Tensor, trial: DeferralTrial, place: SlotPlacement | None = None) -> None:
        if not is_plain_flat(tensor):
            return
        index = tensor.get_device()
        with self.lock, torch.cuda.device(index):
            if self._one_stream:
                lane = self._lanes[index, torch._C._cuda_getCurrentRawStream(index)]
                lane.submit_trial(tensor, tensor.data_ptr(), trial, _base(place))

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

    def _run_deferred(self) -> None:
        """Run the deferred reads, on the stream on which the tensors were seen."""
        if not (deferred := self._deferred) or self._reading:
            return
        index = deferred.lane.device.index
        try:
            with nullcontext() if index == torch._C._cuda_getDevice() else torch.cuda.device(index):
                self._reading = True
                while deferred:  # one by one, so that recording continues after an interrupt, as in a notebook
                    self.read_many(deferred)
                    if not deferred:
                        break
                    tensor, version, address, kind, bound, slot, step, place = deferred.pop()
                    if tensor._version == version and tensor.data_ptr() == address:
                        self._address = address
                        # Equal to the token from `describe`.
                        at = tensor.untyped_storage()._cdata, tensor.storage_offset()
                        token = kind.dtype, version, *at, *kind.shape
                        self.read_deferred(tensor, kind, token, bound, slot, step, place)
                    else:
                        deferred.lane.count_skipped(kind.nbytes)
                        self.read_deferred(None, kind, None, bound, slot, step, place)
        finally:
            self._reading = False
            deferred.flush_with_next()

    def flush(self) -> None:
        with self.lock:
            if not torch._C._cuda_isCurrentStreamCapturing():
                self._flush()

    def discard_deferred(self) -> None:
        with self.lock:
            self._deferred = None
            for lane in self._lanes.values():
                lane.discard_deferred()

    def _new_lane(self, index: int, stream: int) -> Lane:
        lane = self._lanes[index, stream] = self._open_lane(index, stream)
        lane.read_waiting = self.read_waiting
        if len(self._lanes) != len(self._gpus) and self._one_stream:
            self._one_stream = False
            self._flush()  # includes what was deferred before
        return lane

    def _begin(self, phase: int) -> None:
        """Flush at the start of a forward or backward, also one inside another."""
        self._flush()
        self._phase = phase
        if phase != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._flush_quietly)

    def _flush(self) -> None:
        self._run_deferred()
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
            self._run_deferred()
            for lane in self._lanes.values():
                lane.end_step()

    def wait(self, tickets: Sequence[CudaTicket]) -> None:
        for batch in dict.fromkeys([ticket.batch for ticket in tickets]):
            batch.rows()

    def collect(self, tickets: Sequence[CudaTicket]) -> CollectedSummaries:
        # This loop competes with the launch of the next step for the interpreter, so it visits few tickets.
        firsts, unchanged = list(tickets), [False] * len(tickets)
        again = [(place, ticket) for place, ticket in enumerate(tickets) if ticket.known is not None]
        for place, ticket in again:
            firsts[place] = first = first_sighting(ticket)
            unchanged[place] = first is not ticket
        rows, starts = _joined(dict.fromkeys(first.batch for first in firsts))
        places = [starts[first.batch] + first.number for first in firsts]
        results = rows.take(places)
        gone = {start + number for batch, start in starts.items() for number in batch.missed}
        missed = {place for place, row in enumerate(places) if row in gone} if gone else ()
        for place, ticket in again:
            if ticket.known is not None and not ticket.probed:
                known = first_sighting(ticket.known)
                digest = known.batch.rows()["digest"][known.number]
                unchanged[place] = known.number not in known.batch.missed and results["digest"][place] == digest
        elements = np.array([ticket.elements for ticket in tickets], np.int64)
        return CollectedSummaries(columns(results, elements), unchanged, missed)

    @property
    def native_reads(self) -> NativeReads | None:
        classes = CudaReader, DeferredReads, Lane, Batch, BatchRead, CudaTicket, WaitingTensor
        return NativeReads(classes, torch._C, limits())

    def close(self) -> None:
        for copies in self._host_copies.values():
            copies.close()
        self._host_copies.clear()
        self._deferred = None
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
        return Lane(gpu, weights, device, stream, properties.total_memory)


def _joined(batches: Iterable[Batch]) -> tuple[npt.NDArray[Any], dict[Batch, int]]:
    """Wait for the rows of all batches, and return them with the start of each batch."""
    rows = [np.empty(0, RESULT)]
    starts: dict[Batch, int] = {}
    size = 0
    for batch in batches:
        rows.append(batch.rows())
        starts[batch] = size
        size += batch.size
    return rows[1] if len(rows) == 2 else np.concatenate(rows), starts


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
