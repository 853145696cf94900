"""Tensors that were looked at on a device: rows of the index, once what was found there has arrived.

No object is made for a record here: a step of a large model has thousands, and the interpreter that would make them is
the one that launches the step. Worse, objects that live until the step ends grow old for the garbage collector, which
then soon goes through all that the program holds. So there are columns, of numbers, strings and plain tuples of these.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from itertools import compress, repeat
from typing import Any

from tensortap.capture.deferred.read_order import Place
from tensortap.core.records import Key, Location
from tensortap.frameworks.base import DeviceReader

__all__ = ["PendingRows"]

_AT_ONCE = (*Key._fields, "seq", "cls", "dtype")
_NOWHERE = (None,) * len(Location._fields)


class PendingRows:
    """Rows of one device, in the order in which the tensors came."""

    def __init__(self, device_reader: DeviceReader, numbers: Iterator[int], changed_unseen: set[str]) -> None:
        self.device_reader = device_reader
        self._numbers = numbers
        self._changed_unseen = changed_unseen
        self._rows: list[tuple[Any, ...]] = []
        """What is known at once, as `_AT_ONCE` names it."""
        self._shapes: list[tuple[int, ...]] = []  # apart: a tuple that holds another is not let go of so soon
        self.tickets: list[Any] = []
        self._before: list[int | None] = []
        """The row of an earlier sighting of what should be the same tensor."""
        self._locations: dict[int, Location] = {}
        self._borrowed: set[int] = set()
        """Rows whose location is that of the row before."""
        self.known: dict[Hashable, int] = {}
        """By token, the row of a tensor that may be met again."""
        self._watch = device_reader.watch()
        self._twice: dict[int, tuple[Place, Any]] = {}
        """Rows that were read at once and again, with the second ticket."""
        self._gone = False
        """Whether this is in other hands now."""

    def __len__(self) -> int:
        return len(self._rows)

    def location(self, row: int | None) -> Location | None:
        return self._locations.get(row) if row is not None else None

    def append(self, row: tuple[Any, ...], shape: tuple[int, ...], ticket: Any, before: int | None) -> None:
        """A tensor was met: its key, seq, cls and dtype in a row. `before` is the number of the row where it was met
        before."""
        self._rows.append(row)
        self._shapes.append(shape)
        self.tickets.append(ticket)
        self._before.append(before)

    def keep(self, location: Location, borrowed: bool) -> None:
        """Where the newest row's bytes are; borrowed are those of the row before it."""
        row = len(self._rows) - 1
        self._locations[row] = location
        if borrowed:
            self._borrowed.add(row)

    def remember(self, tensor: Any, token: Hashable) -> None:
        """The newest row is the one that later sightings of the tensor refer to."""
        self.known[token] = len(self._rows) - 1
        self._watch.add(tensor)

    def read_again(self, row: int, place: Place, ticket: Any) -> None:
        """A row that was read at once was read again."""
        if self._gone:
            place.cut_short()
        else:
            self._twice[row] = place, ticket

    def forget(self) -> None:
        """No tensor is known again from here on, and nothing is added."""
        self._gone = True
        self.known.clear()
        self._watch.clear()

    @property
    def may_wait(self) -> bool:
        """Not while somebody wants to learn from them whether tensors of a place can be put off at all."""
        return all(place.known for place, _ in self._twice.values())

    def arrive(self) -> None:
        self.device_reader.arrive(self.tickets)

    def columns(self) -> Mapping[str, Any]:
        """Waits for the device."""
        found, unchanged, missed = self.device_reader.collect(self.tickets)
        self._judge(found["digest"])
        columns: dict[str, Any] = dict(found)
        columns |= zip(_AT_ONCE, zip(*self._rows, strict=True), strict=True)
        columns["shape"] = self._shapes
        tensors: list[int] = []
        for row, (before, same) in enumerate(zip(self._before, unchanged, strict=True)):
            if row in missed:
                tensors.append(-1)
            else:
                tensors.append(tensors[before] if same and before is not None else next(self._numbers))
        columns["tensor"] = tensors
        locations = self._found_locations(unchanged) if self._locations else repeat(_NOWHERE, len(self._rows))
        columns |= zip(Location._fields, zip(*locations, strict=True), strict=True)
        if missed:
            kept = [row not in missed for row in range(len(self._rows))]
            columns = {name: list(compress(column, kept)) for name, column in columns.items()}
        return columns

    def _judge(self, digests: Any) -> None:
        """Learn for later steps which tensors can be put off."""
        if not self._twice:
            return
        again = self.device_reader.collect([ticket for _, ticket in self._twice.values()])
        for number, (row, (place, _)) in enumerate(self._twice.items()):
            if number not in again.missed:
                place.compared(bool(again.columns["digest"][number] == digests[row]))

    def _found_locations(self, unchanged: Any) -> Iterator[tuple[Any, ...]]:
        module = _AT_ONCE.index("module")
        for row, same in enumerate(unchanged):
            if row in self._borrowed and not same:
                self._changed_unseen.add(self._rows[row][module])
                yield _NOWHERE
            else:
                yield self._locations.get(row, _NOWHERE)
