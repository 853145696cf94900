"""Values attached to modules, but stored outside of them."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

__all__ = ["ModuleNotes"]

N = TypeVar("N")


class ModuleNotes(Generic[N]):
    """One value for each module, by identity, since a module may define equality.

    A value is dropped with its module, so it must not refer to it. A copy of a module has none.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Any], N]] = {}

    def get(self, module: Any) -> N | None:
        found = self._notes.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def put(self, module: Any, note: N) -> None:
        number = id(module)

        def discard(dead: weakref.ref[Any]) -> None:
            known = self._notes.get(number)
            if known is not None and known[0] is dead:  # another module may have the number by now
                del self._notes[number]

        self._notes[number] = weakref.ref(module, discard), note

    def drop(self, module: Any) -> N | None:
        """Remove a module's value, and return it."""
        note = self.get(module)
        if note is not None:
            del self._notes[id(module)]
        return note
