"""Tensors that were looked at on a device: rows of the index, once what was found there has arrived.

No object is made for a record here: a step of a large model has thousands, and the interpreter that would make them is
the one that launches the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tensortap.frameworks.base import Workshop
from tensortap.records import Key, Location

__all__ = ["Arriving", "Sighting"]


@dataclass(slots=True, eq=False)
class Sighting:
    """A tensor as it was met."""

    key: Key
    seq: int
    cls: str
    dtype: str
    shape: tuple[int, ...]
    ticket: Any
    before: Sighting | None
    """An earlier sighting of what should be the same tensor."""
    tensor: int = -1
    """Its number, known once it has arrived."""
    location: Location | None = None
    borrowed: bool = False
    """Whether the location is that of the sighting before."""


class Arriving:
    """Rows of one device, in the order in which the tensors came."""

    def __init__(self, workshop: Workshop, numbers: Iterator[int], changed_unseen: set[str]) -> None:
        self.workshop = workshop
        self._numbers = numbers
        self._changed_unseen = changed_unseen
        self.sightings: list[Sighting] = []

    def __len__(self) -> int:
        return len(self.sightings)

    def columns(self) -> Mapping[str, Any]:
        """Waits for the device."""
        sightings = self.sightings
        found, unchanged = self.workshop.collect([seen.ticket for seen in sightings])
        columns: dict[str, Any] = dict(found)
        for place, name in enumerate(Key._fields):
            columns[name] = [seen.key[place] for seen in sightings]
        columns["seq"] = [seen.seq for seen in sightings]
        columns["cls"] = [seen.cls for seen in sightings]
        columns["dtype"] = [seen.dtype for seen in sightings]
        columns["shape"] = [seen.shape for seen in sightings]
        for seen, same in zip(sightings, unchanged, strict=True):
            seen.tensor = seen.before.tensor if same and seen.before is not None else next(self._numbers)
        columns["tensor"] = [seen.tensor for seen in sightings]
        locations = list(self._locations(unchanged))
        columns["file"] = [location and location.file for location in locations]
        columns["offset"] = [location and location.offset for location in locations]
        columns["nbytes"] = [location and location.nbytes for location in locations]
        return columns

    def _locations(self, unchanged: Any) -> Iterator[Location | None]:
        for seen, same in zip(self.sightings, unchanged, strict=True):
            if seen.borrowed and not same:
                self._changed_unseen.add(seen.key.module)
                yield None
            else:
                yield seen.location
