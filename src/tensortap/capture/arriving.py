"""Tensors that were looked at on a device: rows of the index, once what was found there has arrived.

No object is made for a record here: a step of a large model has thousands, and the interpreter that would make them is
the one that launches the step. Worse, objects that live until the step ends grow old for the garbage collector, which
then soon goes through all that the program holds. So there are columns, of numbers, strings and plain tuples of these.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from tensortap.frameworks.base import Identity, Workshop
from tensortap.records import Key, Location

__all__ = ["Arriving"]


class Arriving:
    """Rows of one device, in the order in which the tensors came."""

    def __init__(self, workshop: Workshop, numbers: Iterator[int], changed_unseen: set[str]) -> None:
        self.workshop = workshop
        self._numbers = numbers
        self._changed_unseen = changed_unseen
        self._keys: list[tuple[Any, ...]] = []
        self._seqs: list[int] = []
        self._classes: list[str] = []
        self._dtypes: list[str] = []
        self._shapes: list[tuple[int, ...]] = []
        self._tickets: list[Any] = []
        self._before: list[int | None] = []
        """The row of an earlier sighting of what should be the same tensor."""
        self._locations: list[Location | None] = []
        self._borrowed: set[int] = set()
        """Rows whose location is that of the row before."""
        self._rows: dict[Hashable, int] = {}
        """By token, where a tensor was met that may be met again."""
        self._alive: dict[int, Callable[[], bool]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def row_of(self, identity: Identity | None) -> int | None:
        """Where this very tensor was met before."""
        row = self._rows.get(identity.token) if identity is not None else None
        return row if row is not None and self._alive[row]() else None

    def ticket(self, row: int | None) -> Any:
        return self._tickets[row] if row is not None else None

    def location(self, row: int | None) -> Location | None:
        return self._locations[row] if row is not None else None

    def append(
        self, key: Key, seq: int, cls: str, dtype: str, shape: tuple[int, ...], ticket: Any, before: int | None
    ) -> None:
        """A tensor was met; `before` is the row where it was met first."""
        self._keys.append(tuple(key))
        self._seqs.append(seq)
        self._classes.append(cls)
        self._dtypes.append(dtype)
        self._shapes.append(shape)
        self._tickets.append(ticket)
        self._before.append(before)
        self._locations.append(None)

    def keep(self, location: Location, borrowed: bool) -> None:
        """Where the newest row's bytes are; borrowed are those of the row before it."""
        self._locations[-1] = location
        if borrowed:
            self._borrowed.add(len(self) - 1)

    def remember(self, identity: Identity | None) -> None:
        """The newest row is the one that later sightings of the tensor refer to."""
        if identity is not None:
            row = len(self) - 1
            self._rows[identity.token] = row
            self._alive[row] = identity.alive

    def forget(self) -> None:
        """No tensor is known again from here on."""
        self._rows.clear()
        self._alive.clear()

    def columns(self) -> Mapping[str, Any]:
        """Waits for the device."""
        found, unchanged = self.workshop.collect(self._tickets)
        columns: dict[str, Any] = dict(found)
        for place, name in enumerate(Key._fields):
            columns[name] = [key[place] for key in self._keys]
        columns["seq"] = self._seqs
        columns["cls"] = self._classes
        columns["dtype"] = self._dtypes
        columns["shape"] = self._shapes
        tensors: list[int] = []
        for before, same in zip(self._before, unchanged, strict=True):
            tensors.append(tensors[before] if same and before is not None else next(self._numbers))
        columns["tensor"] = tensors
        locations = list(self._found_locations(unchanged))
        columns["file"] = [location and location.file for location in locations]
        columns["offset"] = [location and location.offset for location in locations]
        columns["nbytes"] = [location and location.nbytes for location in locations]
        return columns

    def _found_locations(self, unchanged: Any) -> Iterator[Location | None]:
        for row, (location, same) in enumerate(zip(self._locations, unchanged, strict=True)):
            if row in self._borrowed and not same:
                self._changed_unseen.add(Key(*self._keys[row]).module)
                yield None
            else:
                yield location
