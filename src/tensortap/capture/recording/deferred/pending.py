"""Rows of the index for tensors that were read on a device, until the results have arrived.

No object is made for a record here. A step of a large model has thousands of records, and the interpreter that would
make the objects also launches the step. Objects that live until the step ends also age for the garbage collector, which
then soon traverses everything that the program holds. So there are columns of numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import compress, islice
from typing import Any

import numpy as np
import pyarrow as pa

from tensortap.capture import native_classes
from tensortap.capture.incidents.alarm import Alarm
from tensortap.capture.recording.deferred.entries import DeviceEntries, new_device_entries
from tensortap.capture.recording.deferred.read_order import ReadSlot
from tensortap.capture.recording.repeated_columns import RepeatedColumns, no_locations, slot_values
from tensortap.capture.recording.slots import RecordSlot
from tensortap.core.records import Location
from tensortap.frameworks.device_reader import DeviceReader
from tensortap.frameworks.tensor_kind import TensorKind

__all__ = ["PendingRows", "SecondRead"]

_NOWHERE = (None,) * len(Location._fields)


class PendingRows:
    """Rows of one device, in the order in which the tensors came. `native/deferred.h` appends most of them."""

    __slots__ = (
        "_alarm",
        "_borrowed",
        "_changed_unseen",
        "_locations",
        "_others",
        "_repeated",
        "_repeats",
        "_sealed",
        "_second_reads",
        "_tensors",
        "device_reader",
        "entries",
    )

    def __init__(
        self,
        device_reader: DeviceReader,
        tensors: Iterator[int],
        repeated: RepeatedColumns,
        changed_unseen: set[str],
        alarm: Alarm | None = None,
    ) -> None:
        self._alarm = alarm
        self.device_reader = device_reader
        self._tensors = tensors
        """The numbers of tensors."""
        self._changed_unseen = changed_unseen
        self._repeated = repeated
        self.entries = new_device_entries(device_reader)
        self._locations: dict[int, Location] = {}
        self._borrowed: set[int] = set()
        """Rows whose location is that of the earlier row."""
        self._second_reads: dict[int, tuple[ReadSlot, Any]] = {}
        """Ticket of the second read, for rows that were read twice."""
        self._repeats: dict[int, int] = {}
        """Rows that are dropped if their digest is that of another row."""
        self._sealed = False
        """Whether the rows were passed on, so that nothing is added any more."""
        self._others: Sequence[PendingRows] = ()
        """Rows of later steps that are written with these."""

    def __len__(self) -> int:
        return sum(len(rows.entries) for rows in (self, *self._others))

    def location(self, row: int) -> Location | None:
        return self._locations.get(row)

    def append(
        self, slot: RecordSlot, kind: TensorKind, ticket: Any, step: int, seq: int, before: int, placement: int | None
    ) -> None:
        """Add a tensor. `before` is the row of its earlier sighting, or -1, and `placement` a number of the writer."""
        self.entries.append(slot, kind, ticket, step, seq, before, -1 if placement is None else placement)

    def keep(self, location: Location, borrowed: bool) -> None:
        """Set where the newest row's bytes are. Borrowed bytes are those of its earlier sighting."""
        row = len(self.entries) - 1
        self._locations[row] = location
        if borrowed:
            self._borrowed.add(row)

    def drop_if_equal(self, row: int) -> None:
        """Drop the newest row later, if it has the digest of this one."""
        self._repeats[len(self.entries) - 1] = row

    def add_second_read(self, row: int, slot: ReadSlot, ticket: Any) -> None:
        """Add the second read of a row, to compare it with the first."""
        if self._sealed:
            slot.report_cut_off()
        else:
            self._second_reads[row] = slot, ticket

    def seal(self) -> None:
        """Release all tokens. Nothing is added from now on."""
        self._sealed = True
        self.entries.release()

    @property
    def may_wait(self) -> bool:
        """Whether the rows may stay in memory: not while a trial in them decides over deferring a slot."""
        return all(slot.decided for slot, _ in self._second_reads.values())

    @property
    def gathers(self) -> bool:
        return self.may_wait and not self._locations and not self._repeats and self._alarm is None

    def join(self, others: Sequence[Any]) -> None:
        self._others = others

    def arrive(self) -> None:
        self.device_reader.wait(self.entries)  # type: ignore[arg-type]

    def columns(self) -> Mapping[str, Any]:
        """Wait for the device, and return the complete rows by column."""
        steps = [rows.entries for rows in (self, *self._others)]
        found, unchanged, missed = self.device_reader.collect(*steps)  # type: ignore[arg-type]
        joined = self._join_natively(unchanged) if not missed and not self._repeats else None
        step, seq, before, placements = self._numbers().T if joined is None else joined[:-1]
        self._compare_second_reads(found["digest"], unchanged, before)
        missed = {*missed, *self._equal_rows(found["digest"], missed, placements)}
        columns: dict[str, Any] = dict(found)
        columns |= self._repeated.of_slots(*(entries.slots for entries in steps))
        columns |= self._repeated.of_tensors(*(entries.kinds for entries in steps))
        columns["step"], columns["seq"] = step, seq
        if (placements >= 0).any():
            columns["placement"] = [None if placement < 0 else placement for placement in placements.tolist()]
        columns["tensor"] = self._tensor_numbers(before, unchanged, missed) if joined is None else joined[-1]
        if self._locations:
            columns |= zip(Location._fields, zip(*self._final_locations(unchanged), strict=True), strict=True)
        else:
            columns |= no_locations(len(self))
        kept = np.array([row not in missed for row in range(len(self))]) if missed else None
        if self._alarm is not None:
            dtypes = [kind.name for kind in self.entries.kinds]
            shown = {**columns, **slot_values(self.entries.slots), "dtype": dtypes}
            self._alarm.saw_columns(shown if kept is None else _only(shown, kept))
        return columns if kept is None else _only(columns, kept)

    def _joined(self) -> Iterator[tuple[int, PendingRows]]:
        """Yield the rows of each step with the place of the first of them."""
        start = 0
        for rows in (self, *self._others):
            yield start, rows
            start += len(rows.entries)

    def _numbers(self) -> Any:
        """Return the numbers of all rows; see `DeviceEntries.numbers`. Earlier sightings are by their place here."""
        steps = []
        for start, rows in self._joined():
            numbers = np.frombuffer(rows.entries.numbers(), np.int64).reshape(-1, 4).copy()
            numbers[:, 2] += np.where(numbers[:, 2] < 0, 0, start)
            steps.append(numbers)
        return np.concatenate(steps)

    def _join_natively(self, unchanged: Any) -> Any:
        """Return the numbers of rows and tensors by column; None if the rows are not those of C code."""
        steps = [rows.entries for _, rows in self._joined()]
        if isinstance(steps[0], DeviceEntries) or (native := native_classes.load()) is None:
            return None
        columns = np.empty((5, len(self)), np.int64)
        if (count := native.join_numbers(steps, np.asarray(unchanged, bool), columns)) is None:
            return None
        columns[-1] = np.fromiter(islice(self._tensors, count), np.int64, count)[columns[-1]]
        return columns

    def _tensor_numbers(self, before: Any, unchanged: Any, missed: Collection[int]) -> Any:
        """Return the number of each row's tensor: that of its earlier sighting, if it has not changed since."""
        source = before.copy()
        again = (source >= 0) & np.asarray(unchanged, bool)
        again[list(missed)] = False
        new = ~again
        new[list(missed)] = False
        numbers = np.full(len(source), -1, np.int64)
        numbers[new] = list(islice(self._tensors, int(new.sum())))
        while again[source[again]].any():  # a row whose earlier sighting has an earlier one, too
            source[again] = np.where(again[source[again]], source[source[again]], source[again])
        numbers[again] = numbers[source[again]]
        return numbers

    def _equal_rows(self, digests: Any, missed: Collection[int], placements: Any) -> Iterator[int]:
        """Yield the rows that are dropped."""
        kinds = self.entries.kinds
        for row, other in self._repeats.items():
            kind, place = kinds[row], placements[row]
            same_kind = kind.shape == kinds[other].shape and kind.name == kinds[other].name
            if same_kind and place == placements[other] and digests[row] == digests[other] and other not in missed:
                yield row

    def _compare_second_reads(self, digests: Any, unchanged: Any, before: Any) -> None:
        """Learn for later steps which reads can be deferred."""
        reads = [(start + row, *read) for start, rows in self._joined() for row, read in rows._second_reads.items()]
        if not reads:
            return
        again = self.device_reader.collect([ticket for *_, ticket in reads])
        for number, (row, slot, _) in enumerate(reads):
            if number not in again.missed:
                # A deferred tensor that was seen before is not read again. So it must not have changed since then.
                as_before = before[row] < 0 or bool(unchanged[row])
                slot.report_comparison(as_before and bool(again.columns["digest"][number] == digests[row]))

    def _final_locations(self, unchanged: Any) -> Iterator[tuple[Any, ...]]:
        for row, same in enumerate(unchanged):
            if row in self._borrowed and not same:
                self._changed_unseen.add(self.entries.slots[row].module)
                yield _NOWHERE
            else:
                yield self._locations.get(row, _NOWHERE)


def _only(columns: Mapping[str, Any], kept: Any) -> dict[str, Any]:
    """Return the rows of columns that are kept."""

    def chosen(column: Any) -> Any:
        if isinstance(column, pa.Array):
            return column.filter(pa.array(kept))
        return column[kept] if isinstance(column, np.ndarray) else list(compress(column, kept))

    return {name: chosen(column) for name, column in columns.items()}


class SecondRead:
    """A second read of a row, which shows whether the first could have been deferred."""

    __slots__ = ("_pending", "_row", "_slot")

    def __init__(self, slot: ReadSlot, pending: PendingRows, row: int) -> None:
        self._slot = slot
        self._pending = pending
        self._row = row

    @property
    def safe_delay(self) -> int:
        return self._slot.safe_delay

    def report_second_read(self, others: int, ticket: Any) -> None:
        self._slot.report_delay(others, changed=ticket is None)
        if ticket is not None:
            self._pending.add_second_read(self._row, self._slot, ticket)
