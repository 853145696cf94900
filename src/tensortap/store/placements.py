"""The placements of one rank: a line of JSON for each distinct one. Rows of the index name them by number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from tensortap.core.placement import Placement
from tensortap.store.lines import read_lines
from tensortap.store.source import Bytes

__all__ = ["PlacementTable", "read_placements"]


class PlacementTable(Sequence[Placement]):
    """Numbers placements in the order in which they are first used. `number` may be called from any thread."""

    def __init__(self, added: Callable[[Placement], None] | None = None) -> None:
        """`added` is called with each new placement, before its number is returned."""
        self._placements: list[Placement] = []
        self._numbers: dict[Placement, int] = {}
        self._added = added
        self._lock = threading.Lock()

    def number(self, placement: Placement) -> int:
        """Return the number of a placement, which is new or was numbered before."""
        found = self._numbers.get(placement)
        if found is None:
            with self._lock:
                found = self._numbers.get(placement)
                if found is None:
                    if self._added is not None:
                        self._added(placement)
                    found = self._numbers[placement] = len(self._placements)
                    self._placements.append(placement)
        return found

    @overload
    def __getitem__(self, at: int) -> Placement: ...
    @overload
    def __getitem__(self, at: slice) -> list[Placement]: ...
    def __getitem__(self, at: int | slice) -> Placement | list[Placement]:
        return self._placements[at]

    def __len__(self) -> int:
        return len(self._placements)

    def __iter__(self) -> Iterator[Placement]:
        return iter(self._placements)


def read_placements(source: Bytes, name: str) -> list[Placement]:
    """Read a placements.jsonl. Return none if the run has no such file; raise ValueError if it is damaged."""
    try:
        return [Placement.parse(value) for value in read_lines(source, name)]
    except FileNotFoundError:
        return []
