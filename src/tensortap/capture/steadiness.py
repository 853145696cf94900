"""Which tensors stay as they are for a while after they are seen, so that a device may read several of them together.

That is found out, not assumed. In the first step in which a place is met, its tensors are read at once, and again as
late as they would be read at the latest; only if both agree are they put off, from the third step on. One place in
`_CHECKED_EVERY` is tried again in each step. A framework counts most changes, and a tensor that it has counted one for
since is not read: better no record than one of another tensor.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from tensortap.records import Key, shown

__all__ = ["Place", "Steadiness"]

_CHECKED_EVERY = 64


class Place:
    """Where a tensor is met in every step: an input, output or gradient of one call of a module."""

    __slots__ = ("_name", "_notices", "first", "number", "put_off", "steady")

    def __init__(self, name: str, number: int, first: int, notices: deque[str]) -> None:
        self._name = name
        self._notices = notices
        self.number = number
        self.first = first
        """The recorded step in which it was first met."""
        self.steady: bool | None = None
        """Whether tensors stay as they are here; None as long as nobody knows."""
        self.put_off = False
        """Whether any was read later because of that."""

    def lost(self) -> None:
        """A tensor was changed before it was read."""
        self.steady = False
        self._notices.append(
            f"{self._name} was changed in place before it was read together with others: in that step it is missing, "
            "here and wherever else it was met meanwhile, and from now on it is read at once (gather=False reads every "
            "tensor at once)"
        )

    def tried(self) -> None:
        """Read at once and later it was the same."""
        if self.steady is None:
            self.steady = True

    def failed(self, unseen: bool) -> None:
        """It was not, or could not be read later. `unseen` is a change that the framework did not count."""
        if self.put_off and self.steady and unseen:
            self._notices.append(
                f"{self._name} was changed without its framework knowing before it was read together with others: "
                f"summaries of the last {_CHECKED_EVERY} recorded steps may be of changed values; from now on it is "
                "read at once"
            )
        self.steady = False


class Steadiness:
    """All places. What is found of them may be said in another thread."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int, str, str], Place] = {}
        self._step = -1
        self._steps = -1
        self.notices: deque[str] = deque()
        """What must be told of tensors that turned out to be changed after all."""

    def when(self, key: Key) -> tuple[Place, Literal["now", "twice", "later"]]:
        """How a tensor is to be read: at once, at once and later again, or later."""
        if key.step != self._step:
            self._step = key.step
            self._steps += 1
        now = self._steps
        where = key.module, key.call, key.kind, key.path
        place = self._places.get(where)
        if place is None:
            name = f"{shown(key.module)}: {key.kind} {key.path}"
            place = self._places[where] = Place(name, len(self._places), now, self.notices)
        if place.first == now:
            return place, "twice"
        if not place.steady or now < place.first + 2:  # by then it is known, as a rule: two runs do the same
            return place, "now"
        if (now + place.number) % _CHECKED_EVERY == 0:
            return place, "twice"
        place.put_off = True
        return place, "later"
