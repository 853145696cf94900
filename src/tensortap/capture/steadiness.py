"""Which tensors stay as they are for a while after they are seen, so that a device may read several of them together.

That is found out, not assumed. When a tensor's place is new, the tensor is read at once and again later; only if both
agree is it put off, from the next but one step on: by then it is known in every run, so that two runs do the same. One
place in `_CHECKED_EVERY` is tried again in each step. A framework counts most changes, and a tensor that it has counted
one for since is not read: better no record than one of another tensor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from tensortap.records import Key, shown

__all__ = ["Place", "Steadiness"]

_CHECKED_EVERY = 64


@dataclass(slots=True, eq=False)
class Place:
    """Where a tensor is met in every step: an input, output or gradient of one call of a module."""

    name: str
    number: int
    step: int
    """When it was met first."""
    steady: bool | None = None
    """Whether tensors stay as they are here; None as long as nobody knows."""


class Steadiness:
    """Another thread may say what was found."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int, str, str], Place] = {}
        self.notices: deque[str] = deque()
        """What must be told of tensors that turned out to be changed after all."""

    def when(self, key: Key) -> tuple[Place, Literal["now", "twice", "later"]]:
        """How a tensor is to be read: at once, at once and later again, or later."""
        where = key.module, key.call, key.kind, key.path
        place = self._places.get(where)
        if place is None:
            name = f"{shown(key.module)}: {key.kind} {key.path}"
            place = self._places[where] = Place(name, len(self._places), key.step)
            return place, "twice"
        if not place.steady or key.step < place.step + 2:
            return place, "now"
        return place, "twice" if (key.step + place.number) % _CHECKED_EVERY == 0 else "later"

    def compared(self, place: Place, same: bool) -> None:
        """What it was at once and what it was later were the same or not."""
        if place.steady and not same:
            self.notices.append(
                f"{place.name} was changed without its framework knowing before it was read together with others: "
                f"summaries of the last {_CHECKED_EVERY} steps may be of changed values; from now on it is read at once"
            )
        place.steady = same and place.steady is not False

    def missed(self, place: Place) -> None:
        """It was changed before it was read."""
        place.steady = False
        self.notices.append(
            f"{place.name} was changed in place before it was read together with others: it is missing from one step, "
            "and is read at once from now on (gather=False reads every tensor at once)"
        )
