"""CUDA tensors, looked at where they are: summaries are launched at once or a little later, and known later still.

Each stream has a lane of its own, where everything happens in the stream's order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tensortap.frameworks.base import Collected, Patience, Trial
from tensortap.frameworks.torch_lane import Lane
from tensortap.frameworks.torch_results import CudaTicket, first_sighting
from tensortap.frameworks.torch_sending import CudaSending
from tensortap.frameworks.torch_tensors import PLAIN, dense
from tensortap.kernels.gpu import FLAT, RESULT, Device, Gpu, Layout, columns, lay_out
from tensortap.kernels.reference import digest_weights
from tensortap.sending import Incoming

__all__ = ["CudaWorkshop"]

_TOO_LARGE = 128 << 20
"""Bytes from which on a tensor is read by itself."""


class CudaWorkshop:
    """Takes tensors of any CUDA device and stream. CudaError where the kernels cannot be compiled or launched."""

    def __init__(self) -> None:
        self._gpus: dict[int, tuple[Gpu, torch.Tensor]] = {}
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._sending: dict[int, CudaSending] = {}
        self._lock = threading.RLock()  # the end of a backward comes from anywhere
        self._phase = -1
        """The backward that is under way; -1 outside of one."""
        self._error: Exception | None = None

    def submit(
        self, tensor: torch.Tensor, known: CudaTicket | None = None, later: Patience | None = None
    ) -> CudaTicket:
        tensor, own = _plain(tensor)
        if (index := tensor.get_device()) == torch._C._cuda_getDevice():
            return self._submit(tensor, own, index, known, later)
        with torch.cuda.device(index):  # kernels are launched in the context that is current
            return self._submit(tensor, own, index, known, later)

    def submit_again(self, tensor: torch.Tensor, trial: Trial) -> None:
        tensor, own = _plain(tensor)
        index = tensor.get_device()
        with self._lock, torch.cuda.device(index):
            lane, found, address, _, may_wait = self._found(tensor, own, index)
            if may_wait:
                lane.submit_again(found, address, trial)

    def _submit(
        self,
        tensor: torch.Tensor,
        own: bool,
        index: int,
        known: CudaTicket | None,
        later: Patience | None,
    ) -> CudaTicket:
        with self._lock:
            self._look_at_phase()
            lane, tensor, address, layout, may_wait = self._found(tensor, own, index)
            return lane.submit(tensor, address, layout, known, later if may_wait else None)

    def settle(self) -> None:
        with self._lock:
            if not torch.cuda.is_current_stream_capturing():
                self._settle()

    def forget(self) -> None:
        with self._lock:
            for lane in self._lanes.values():
                lane.forget()

    def _found(self, tensor: torch.Tensor, may_wait: bool, index: int) -> tuple[Lane, torch.Tensor, int, Layout, bool]:
        """The lane, what to read where, and whether that can wait: then it is the tensor's own memory."""
        if tensor.is_complex():
            tensor, may_wait = torch.view_as_real(tensor.resolve_conj()), False
        if tensor.is_neg():
            tensor, may_wait = tensor.resolve_neg(), False
        address, layout = tensor.data_ptr(), FLAT
        if address % 16 or not tensor.is_contiguous():
            may_wait = False
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
        # With several streams, another may be told of a tensor's last use, and get its memory, before it is read. A
        # launch for a large tensor alone is no loss.
        may_wait = may_wait and len(self._lanes) == len(self._gpus) and tensor.nbytes < _TOO_LARGE
        return lane, tensor, address, layout, may_wait

    def _look_at_phase(self) -> None:
        """Whether a forward or backward has begun, or goes on inside another: then none waits any longer."""
        phase = torch._C._current_graph_task_id()
        if phase != self._phase:
            self._settle()
            self._phase = phase
            if phase != -1:
                torch.autograd.Variable._execution_engine.queue_callback(self._settle_quietly)

    def _settle(self) -> None:
        for (index, _), lane in self._lanes.items():
            with torch.cuda.device(index):
                lane.settle()

    def _settle_quietly(self) -> None:
        """At the end of a backward, which must not fail for it."""
        try:
            self.settle()
        except Exception as error:
            self._error = error

    def parts(self, tensor: torch.Tensor) -> Iterator[Incoming]:
        tensor = dense(tensor)
        index = tensor.get_device()
        if index not in self._sending:
            self._sending[index] = CudaSending(tensor.device)
        yield from self._sending[index].parts(tensor)

    def end_step(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            for lane in self._lanes.values():
                lane.end_step()

    def collect(self, tickets: Sequence[CudaTicket]) -> Collected:
        # The interpreter that goes through the tickets here is the one that launches the next step: few are looked at.
        firsts, unchanged = list(tickets), [False] * len(tickets)
        again = [(place, ticket) for place, ticket in enumerate(tickets) if ticket.known is not None]
        for place, ticket in again:
            firsts[place] = first = first_sighting(ticket)
            unchanged[place] = first is not ticket
        batches = [first.batch for first in firsts]
        numbers = np.array([first.number for first in firsts], np.int64)
        results = np.empty(len(tickets), RESULT)
        missed: set[int] = set()
        for batch in dict.fromkeys(batches):
            here = np.array([other is batch for other in batches], bool)
            results[here] = batch.rows()[numbers[here]]
            missed.update(np.flatnonzero(here & np.isin(numbers, list(batch.missed))).tolist())
        for place, ticket in again:
            if ticket.known is not None and not ticket.probed:
                known = first_sighting(ticket.known)
                digest = known.batch.rows()["digest"][known.number]
                unchanged[place] = known.number not in known.batch.missed and results["digest"][place] == digest
        elements = np.array([ticket.elements for ticket in tickets], np.int64)
        return Collected(columns(results, elements), unchanged, missed)

    def close(self) -> None:
        for sending in self._sending.values():
            sending.close()
        self._sending.clear()
        self._lanes.clear()

    def _open_lane(self, index: int, stream: int) -> Lane:
        device = torch.device("cuda", index)
        if index not in self._gpus:
            processors = torch.cuda.get_device_properties(index).multi_processor_count
            capability = torch.cuda.get_device_capability(index)
            gpu = Gpu(Device(index, capability, processors, torch.version.cuda or ""))
            weights = torch.from_numpy(digest_weights().view(np.int32)).to(device)
            torch.cuda.current_stream(index).synchronize()  # other streams read it too
            self._gpus[index] = gpu, weights
        gpu, weights = self._gpus[index]
        return Lane(gpu, weights, device, stream)


def _plain(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A tensor that has elements of its own, and whether it was one from the start."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided:
        return tensor, True
    return dense(tensor), False
