"""Results of a CUDA device, which are copied to the host in batches, and their tickets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tensortap.kernels.cuda import driver
from tensortap.kernels.cuda.results import RESULT

__all__ = ["SLOTS", "Batch", "CudaTicket", "TicketColumns", "new_bytes", "new_host"]

SLOTS = 1024
"""Results in a batch."""

_NEW, _SAME, _PROBED, _READ = range(4)
"""The relation of a ticket to the earlier sighting of its tensor, as numbers that `native/rows.h` knows.

`_NEW`: there is no earlier sighting. `_SAME`: it has the same result. `_PROBED`: it was read again if a few elements
differed. `_READ`: it was read again.
"""


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

    @property
    def relation(self) -> int:
        """Its relation to `known`."""
        if self.known is None:
            return _NEW
        if self.known.batch is self.batch and self.known.number == self.number:
            return _SAME
        return _PROBED if self.probed else _READ


class Batch:
    """Results that are copied to the host together."""

    __slots__ = ("_address", "_arrived", "_event", "_free", "_host", "_results", "_rows", "lane", "missed", "size")

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
        self._arrived = False
        """Whether the results are known to be in host memory, where a failing device cannot affect them."""
        self._rows: npt.NDArray[Any] | None = None
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

    def has_arrived(self) -> bool:
        """Return whether the results are in host memory, without waiting for them."""
        if not self._arrived:
            assert self._event is not None
            self._arrived = driver.has_happened(self._event.cuda_event)
        return self._arrived

    def rows(self) -> npt.NDArray[Any]:
        """Wait for the results, and return them."""
        if self._rows is None:
            assert self._event is not None and self._host is not None
            if not self._arrived:
                driver.allow_captures()
                self._event.synchronize()
                self._arrived = True
            self._rows = self._host.numpy()[: self.size * RESULT.itemsize].copy().view(RESULT)  # faster as bytes
            self._free.append(self._host)
            self._host = None
        return self._rows


class TicketColumns(NamedTuple):
    """Tickets by column."""

    batches: list[Batch]
    batch: npt.NDArray[np.int64]
    """The place of each one's batch in `batches`."""
    number: npt.NDArray[np.int64]
    elements: npt.NDArray[np.int64]
    before: npt.NDArray[np.int64]
    """The row of the earlier sighting; -1 if there is none."""
    relation: npt.NDArray[np.int64]
    """The relation of each to the earlier one."""

    @classmethod
    def of(cls, tickets: Any) -> TicketColumns:
        """Return the columns of tickets. Those that they were compared with are among them."""
        if hasattr(tickets, "ticket_columns"):  # `native/rows.h` has them by column
            batches, numbers = tickets.ticket_columns()
            return cls(batches, *np.frombuffer(numbers, np.int64).reshape(-1, 5).T)
        tickets = list(tickets)
        places = {batch: place for place, batch in enumerate(dict.fromkeys(one.batch for one in tickets))}
        rows: dict[CudaTicket | None, int] = {one: row for row, one in enumerate(tickets)}
        rows[None] = -1
        found = [(places[one.batch], one.number, one.elements, rows[one.known], one.relation) for one in tickets]
        return cls(list(places), *np.array(found, np.int64).reshape(-1, 5).T)

    @classmethod
    def joined(cls, groups: Sequence[TicketColumns]) -> TicketColumns:
        """Return the tickets of all groups, one after the other."""
        if len(groups) == 1:
            return groups[0]
        batches: list[Batch] = []
        moved = []
        start = 0
        for group in groups:
            before = np.where(group.before < 0, -1, group.before + start)
            moved.append((group.batch + len(batches), group.number, group.elements, before, group.relation))
            batches += group.batches
            start += len(group.number)
        return cls(batches, *(np.concatenate(column) for column in zip(*moved, strict=True)))

    def find_results(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Wait for the results.

        Return for each ticket: its result, which is that of the earlier sighting if the tensor had not changed since;
        whether the tensor had not changed; and whether it was not read.
        """
        starts = np.cumsum([0, *(batch.size for batch in self.batches)])
        rows = np.concatenate([np.empty(0, RESULT), *(batch.rows() for batch in self.batches)])
        lost = np.zeros(len(rows), bool)
        for start, batch in zip(starts, self.batches, strict=False):
            lost[[start + number for number in batch.missed]] = True
        places = starts[self.batch] + self.number
        unchanged = self.relation == _SAME
        if (self.relation > _SAME).any():  # seldom, so that most steps need no loop
            for row in np.flatnonzero(self.relation):
                earlier = places[self.before[row]]
                if self.relation[row] == _PROBED:
                    unchanged[row] = rows["unchanged"][places[row]]
                elif self.relation[row] == _READ:
                    same = rows["digest"][places[row]] == rows["digest"][earlier]
                    unchanged[row] = same and not lost[earlier]
                    continue
                if unchanged[row]:
                    places[row] = earlier
        return rows.take(places), unchanged, lost[places]


def new_host() -> torch.Tensor:
    """Return page-locked memory for one batch."""
    return new_bytes(SLOTS * RESULT.itemsize, pin_memory=True)


def new_bytes(count: int, **where: Any) -> torch.Tensor:
    """Return memory that is writable in every mode of torch."""
    with torch.inference_mode(False):  # the model may run in inference mode now and outside of it later
        return torch.empty(count, dtype=torch.uint8, **where)
