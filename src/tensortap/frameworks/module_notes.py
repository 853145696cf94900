"""Notes about modules, kept outside of them."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

__all__ = ["ModuleNotes"]

N = TypeVar("N")


class ModuleNotes(Generic[N]):
    """One note for each module, by its identity: a module may define equality.

    A note is forgotten with its module, which it must not refer to. A copy of a module has no note.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Any], N]] = {}

    def get(self, module: Any) -> N | None:
        found = self._notes.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def put(self, module: Any, note: N) -> None:
        number = id(module)

        def forget(dead: weakref.ref[Any]) -> None:
            known = self._notes.get(number)
            if known is not None and known[0] is dead:  # the number may be another module's by now
                del self._notes[number]

        self._notes[number] = weakref.ref(module, forget), note

    def drop(self, module: Any) -> N | None:
        """Forget a module's note, and return it."""
        note = self.get(module)
        if note is not None:
            del self._notes[id(module)]
        return note
