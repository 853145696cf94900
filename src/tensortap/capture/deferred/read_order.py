"""Which tensors stay as they are for a while after they are seen, so that a device may read several of them together.

That is found out, not assumed. In the first recorded step in which a place is met, its tensors are read at once, and
again later; only if both agree are they put off, as a rule from the third step on, and never for longer than they were
tried. Each place is tried again when `_CHECKED_EVERY` steps have been recorded. A framework counts most changes, and a
tensor that it has counted one for since is not read: better no record than one of another tensor.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Literal

from tensortap.core.records import Key, display_name

__all__ = ["Place", "ReadOrder"]

_CHECKED_EVERY = 256
_MOST_TRIED = 64
"""Tensors of a place that are read twice in one step: of one that never ends, not all need be."""
_MOST_PLACES = 100_000


class Place:
    """Where a tensor is met in every step: an input, output or gradient of one call of a module."""

    __slots__ = (
        "_changed",
        "_check",
        "_first",
        "_latest",
        "_name",
        "_notices",
        "_put_off",
        "_same",
        "_since",
        "_tried",
        "_trying",
        "proven",
    )

    def __init__(self, name: str, number: int, now: int, step: int, notices: deque[str]) -> None:
        self._name = name
        self._notices = notices
        self._first = self._trying = now
        self._check = now + 2 + number % _CHECKED_EVERY
        """The recorded step from which on it is to be tried again."""
        self._tried = 0
        self._put_off = False
        self._since, self._latest = step, step
        """The steps in which it was tried the last time but one, and the last time."""
        # Each is only ever set, so that neither of two threads undoes what the other has found.
        self._same = False
        self._changed = False
        """Also if it may be, for all that is known: then it is always read at once."""
        self.proven = sys.maxsize
        """See `frameworks.base.DeferralBound`."""

    @property
    def known(self) -> bool:
        """Whether it was found out what its tensors do."""
        return self._same or self._changed

    def when(self, now: int, step: int) -> Literal["now", "twice", "later"]:
        """See `ReadOrder.when`; `now` counts the recorded steps."""
        # By the third step it is known, as a rule, so that two runs do the same. If it is not, the trial was cut short.
        steady = self._same and not self._changed
        unknown = not self._same and not self._changed and now >= self._trying + 2
        if unknown or (steady and now >= self._check):
            self._trying, self._check, self._tried = now, now + _CHECKED_EVERY, 0
            self._since, self._latest = self._latest, step
        if self._trying == now:
            self._tried += 1
            return "twice" if self._tried <= _MOST_TRIED else "now"
        if not steady or now < self._first + 2:
            return "now"
        self._put_off = True
        return "later"

    def tried(self, others: int, changed: bool) -> None:
        """A tensor was to be read again when so many others had come."""
        self.proven = min(self.proven, others)
        self._changed |= changed

    def cut_short(self) -> None:
        """What it was later came too late to be compared, because the rows of half a step were sent out meanwhile. It
        would again in the next trial, and that others of this place were the same says nothing of this one."""
        self._changed = True

    def lost(self) -> None:
        self._changed = True
        self._notices.append(
            f"{self._name} was changed in place before it was read together with others: in that step it is missing, "
            "here and wherever else it was met meanwhile, and from now on it is read at once (gather=False reads every "
            "tensor at once)"
        )

    def compared(self, same: bool) -> None:
        """What it was at once and what it was later."""
        if same:
            self._same = True
            return
        if self._put_off and not self._changed:
            self._notices.append(
                f"{self._name} was changed without its framework knowing before it was read together with others: its "
                f"summaries since step {self._since} may be of changed values; from now on it is read at once"
            )
        self._changed = True


class ReadOrder:
    """All places. What is found of them may be said in another thread."""

    def __init__(self) -> None:
        self._places: dict[tuple[Any, ...], Place] = {}
        self._step = -1
        self._recorded = -1
        self.notices: deque[str] = deque()
        """What must be told of tensors that turned out to be changed after all."""

    def when(self, key: Key) -> tuple[Place | None, Literal["now", "twice", "later"]]:
        """How a tensor is to be read: at once, at once and later again, or later."""
        if key.step != self._step:
            self._step = key.step
            self._recorded += 1
        where: tuple[Any, ...] = key[3:]  # module, call, kind and path
        place = self._places.get(where)
        if place is None:
            if len(self._places) == _MOST_PLACES:
                return None, "now"
            name = f"{display_name(key.module)}: {key.kind} {key.path}"
            place = Place(name, len(self._places), self._recorded, key.step, self.notices)
            self._places[where] = place
        return place, place.when(self._recorded, key.step)
