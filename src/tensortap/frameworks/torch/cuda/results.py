"""Results of a CUDA device on their way to the host, a batch at a time, and the tickets that they can be had for."""

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
        return self.batch.address_of(self.number)

    @property
    def probed(self) -> bool:
        """Whether a few elements were compared with `known` first; if not, all were read. In another stream `known` may
        not have been finished yet."""
        return self.known is not None and self.known.batch.lane is self.batch.lane


class Batch:
    """Results that travel together."""

    def __init__(self, lane: object, results: torch.Tensor, free: deque[torch.Tensor]) -> None:
        self.lane = lane
        """Whose they are; for telling one from another."""
        self.size = 0
        """So many have been submitted."""
        self._address: int = results.data_ptr()
        self._results = results
        self._free = free
        self._host: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._rows: npt.NDArray[Any] | None = None
        self.unchanged: list[bool] = []
        self.missed: set[int] = set()
        """Those that were changed before they were read."""

    def address_of(self, number: int) -> int:
        """Of one result, on the device."""
        return self._address + number * RESULT.itemsize

    def send(self) -> None:
        """To the host, in the current stream."""
        host = self._free.popleft() if self._free else new_host()
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
            self._rows = self._host.numpy()[: self.size * RESULT.itemsize].copy().view(RESULT)  # as bytes it is faster
            self.unchanged = self._rows["unchanged"].astype(bool).tolist()
            self._free.append(self._host)
            self._host = None
        return self._rows


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


def new_host() -> torch.Tensor:
    """Page-locked memory for one batch."""
    return new_bytes(SLOTS * RESULT.itemsize, pin_memory=True)


def new_bytes(count: int, **where: Any) -> torch.Tensor:
    """Memory that can be written into in any mode of torch."""
    with torch.inference_mode(False):  # the model may run in it now, and outside of it later
        return torch.empty(count, dtype=torch.uint8, **where)
