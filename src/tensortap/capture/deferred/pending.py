"""Rows of the index for tensors that were read on a device, until the results have arrived.

No object is made for a record here. A step of a large model has thousands of records, and the interpreter that would
make the objects also launches the step. Objects that live until the step ends also age for the garbage collector, which
then soon traverses everything that the program holds. So there are columns of numbers, strings and plain tuples.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from itertools import compress, repeat
from typing import Any

from tensortap.capture.alarm import Alarm
from tensortap.capture.deferred.read_order import ReadSlot
from tensortap.core.records import Key, Location
from tensortap.frameworks.device_reader import DeviceReader

__all__ = ["PendingRows"]

_KNOWN_FIELDS = (*Key._fields, "seq", "cls", "dtype")
_NOWHERE = (None,) * len(Location._fields)


class PendingRows:
    """Rows of one device, in the order in which the tensors came."""

    def __init__(
        self,
        device_reader: DeviceReader,
        numbers: Iterator[int],
        changed_unseen: set[str],
        alarm: Alarm | None = None,
    ) -> None:
        self._alarm = alarm
        self.device_reader = device_reader
        self._numbers = numbers
        self._changed_unseen = changed_unseen
        self._rows: list[tuple[Any, ...]] = []
        """The values that are known at once, as `_KNOWN_FIELDS` names them."""
        self._shapes: list[tuple[int, ...]] = []  # separate: the collector keeps track of a tuple that holds another
        self.tickets: list[Any] = []
        self._placements: list[int | None] = []
        """Numbers of placements."""
        self._before: list[int | None] = []
        """The row of an earlier sighting with the same token."""
        self._locations: dict[int, Location] = {}
        self._borrowed: set[int] = set()
        """Rows whose location is that of the earlier row."""
        self.known: dict[Hashable, int] = {}
        """Row of a tensor that may be seen again, by token."""
        self._held = device_reader.hold_tokens()
        self._second_reads: dict[int, tuple[ReadSlot, Any]] = {}
        """Ticket of the second read, for rows that were read twice."""
        self._repeats: dict[int, int] = {}
        """Rows that are dropped if their digest is that of another row."""
        self._sealed = False
        """Whether the rows were passed on, so that nothing is added any more."""

    def __len__(self) -> int:
        return len(self._rows)

    def location(self, row: int | None) -> Location | None:
        return self._locations.get(row) if row is not None else None

    def append(
        self,
        row: tuple[Any, ...],
        shape: tuple[int, ...],
        ticket: Any,
        before: int | None,
        placement: int | None = None,
    ) -> None:
        """Add a tensor: its key, seq, cls and dtype in a row. `before` is the row of its earlier sighting, if any.
        `placement` is the number of its placement."""
        self._rows.append(row)
        self._shapes.append(shape)
        self.tickets.append(ticket)
        self._before.append(before)
        self._placements.append(placement)

    def keep(self, location: Location, borrowed: bool) -> None:
        """Set where the newest row's bytes are. Borrowed bytes are those of its earlier sighting."""
        row = len(self._rows) - 1
        self._locations[row] = location
        if borrowed:
            self._borrowed.add(row)

    def drop_if_equal(self, row: int) -> None:
        """Drop the newest row later, if it has the digest of this one."""
        self._repeats[len(self._rows) - 1] = row

    def remember(self, tensor: Any, token: Hashable) -> None:
        """Let later sightings of the tensor refer to the newest row."""
        self.known[token] = len(self._rows) - 1
        self._held.add(tensor)

    def add_second_read(self, row: int, slot: ReadSlot, ticket: Any) -> None:
        """Add the second read of a row, to compare it with the first."""
        if self._sealed:
            slot.report_cut_off()
        else:
            self._second_reads[row] = slot, ticket

    def seal(self) -> None:
        """Release all tokens. Nothing is added from now on."""
        self._sealed = True
        self.known.clear()
        self._held.clear()

    @property
    def may_wait(self) -> bool:
        """Whether the rows may stay in memory: not while a trial in them decides over deferring a slot."""
        return all(slot.decided for slot, _ in self._second_reads.values())

    def arrive(self) -> None:
        self.device_reader.wait(self.tickets)

    def columns(self) -> Mapping[str, Any]:
        """Wait for the device, and return the complete rows by column."""
        found, unchanged, missed = self.device_reader.collect(self.tickets)
        self._compare_second_reads(found["digest"])
        missed = {*missed, *self._equal_rows(found["digest"], missed)}
        columns: dict[str, Any] = dict(found)
        columns |= zip(_KNOWN_FIELDS, zip(*self._rows, strict=True), strict=True)
        columns["shape"] = self._shapes
        if any(placement is not None for placement in self._placements):
            columns["placement"] = self._placements
        tensors: list[int] = []
        for row, (before, same) in enumerate(zip(self._before, unchanged, strict=True)):
            if row in missed:
                tensors.append(-1)
            else:
                tensors.append(tensors[before] if same and before is not None else next(self._numbers))
        columns["tensor"] = tensors
        locations = self._final_locations(unchanged) if self._locations else repeat(_NOWHERE, len(self._rows))
        columns |= zip(Location._fields, zip(*locations, strict=True), strict=True)
        if missed:
            kept = [row not in missed for row in range(len(self._rows))]
            columns = {name: list(compress(column, kept)) for name, column in columns.items()}
        if self._alarm is not None:
            self._alarm.saw_columns(columns)
        return columns

    def _equal_rows(self, digests: Any, missed: Collection[int]) -> Iterator[int]:
        for row, other in self._repeats.items():
            same_kind = self._shapes[row] == self._shapes[other] and self._rows[row][-1] == self._rows[other][-1]
            same_kind = same_kind and self._placements[row] == self._placements[other]
            if same_kind and digests[row] == digests[other] and other not in missed:
                yield row

    def _compare_second_reads(self, digests: Any) -> None:
        """Learn for later steps which reads can be deferred."""
        if not self._second_reads:
            return
        again = self.device_reader.collect([ticket for _, ticket in self._second_reads.values()])
        for number, (row, (slot, _)) in enumerate(self._second_reads.items()):
            if number not in again.missed:
                slot.report_comparison(bool(again.columns["digest"][number] == digests[row]))

    def _final_locations(self, unchanged: Any) -> Iterator[tuple[Any, ...]]:
        module = _KNOWN_FIELDS.index("module")
        for row, same in enumerate(unchanged):
            if row in self._borrowed and not same:
                self._changed_unseen.add(self._rows[row][module])
                yield _NOWHERE
            else:
                yield self._locations.get(row, _NOWHERE)
