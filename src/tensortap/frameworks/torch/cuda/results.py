"""Results of a CUDA device, which are copied to the host in batches, and their tickets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from tensortap.kernels.cuda import driver
from tensortap.kernels.cuda.results import RESULT

__all__ = ["SLOTS", "Batch", "CudaTicket", "first_sighting", "new_bytes", "new_host"]

SLOTS = 1024
"""Results in a batch."""


@dataclass(slots=True, eq=False)
class CudaTicket:
    """A summary that has been submitted."""

    batch: Batch
    number: int
    """Its index in the batch."""
    elements: int
    known: CudaTicket | None
    """An earlier sighting. It has the same index if its read was still deferred."""

    @property
    def address(self) -> int:
        """Address of its result on the device, valid during the step."""
        return self.batch.address_of(self.number)

    @property
    def probed(self) -> bool:
        """Whether a few elements were compared with `known` first; otherwise all were read.

        They are not compared if `known` is of another stream, where it may not be finished.
        """
        return self.known is not None and self.known.batch.lane is self.batch.lane


class Batch:
    """Results that are copied to the host together."""

    __slots__ = ("_address", "_event", "_free", "_host", "_results", "_rows", "lane", "missed", "size", "unchanged")

    def __init__(self, lane: object, results: torch.Tensor, free: deque[torch.Tensor]) -> None:
        self.lane = lane
        """The lane that they belong to, for comparisons by identity."""
        self.size = 0
        """Number of submitted results."""
        self._address: int = results.data_ptr()
        self._results = results
        self._free = free
        self._host: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._rows: npt.NDArray[Any] | None = None
        self.unchanged: list[bool] = []
        self.missed: set[int] = set()
        """Results of tensors that changed before they were read."""

    def address_of(self, number: int) -> int:
        """Return the address of one result on the device."""
        return self._address + number * RESULT.itemsize

    def send(self) -> None:
        """Start the copy to the host in the current stream."""
        host = self._free.popleft() if self._free else new_host()
        nbytes = self.size * RESULT.itemsize
        host[:nbytes].copy_(self._results[:nbytes], non_blocking=True)
        self._host = host
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def rows(self) -> npt.NDArray[Any]:
        """Wait for the results, and return them."""
        if self._rows is None:
            assert self._event is not None and self._host is not None
            driver.allow_captures()
            self._event.synchronize()
            self._rows = self._host.numpy()[: self.size * RESULT.itemsize].copy().view(RESULT)  # faster as bytes
            self.unchanged = self._rows["unchanged"].astype(bool).tolist()
            self._free.append(self._host)
            self._host = None
        return self._rows


def first_sighting(ticket: CudaTicket) -> CudaTicket:
    """Return the sighting whose result is valid for this one: itself, if the tensor had changed since."""
    while True:
        batch, known = ticket.batch, ticket.known
        batch.rows()
        if known is not None and known.batch is batch and known.number == ticket.number:
            ticket = known
        elif known is None or not batch.unchanged[ticket.number]:
            return ticket
        else:
            ticket = known


def new_host() -> torch.Tensor:
    """Return page-locked memory for one batch."""
    return new_bytes(SLOTS * RESULT.itemsize, pin_memory=True)


def new_bytes(count: int, **where: Any) -> torch.Tensor:
    """Return memory that is writable in every mode of torch."""
    with torch.inference_mode(False):  # the model may run in inference mode now and outside of it later
        return torch.empty(count, dtype=torch.uint8, **where)
