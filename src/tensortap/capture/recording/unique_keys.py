"""Makes the identities of a step's records unique."""

from __future__ import annotations

from typing import Any

from tensortap.core.records import Key

__all__ = ["UniqueKeys"]

_MOST = 100_000


class UniqueKeys:
    """The identities that a step has used.

    They are plain tuples: the garbage collector soon stops tracking those, unlike instances of a class.
    """

    def __init__(self) -> None:
        self._used: set[tuple[Any, ...]] = set()
        self._most = _MOST

    def clear(self) -> None:
        self._used.clear()
        self._most = _MOST

    def unique(self, key: Key) -> tuple[Any, ...]:
        """Return the key, with a ~2 in its path if it was used before, as in a second backward through one graph."""
        plain, number = tuple(key), 1
        while plain in self._used:
            number += 1
            plain = tuple(key._replace(path=f"{key.path}~{number}"))
        self._used.add(plain)
        if len(self._used) > self._most:  # a loop that never ends its step must not grow for ever
            self._used = {known for known in self._used if Key(*known).micro >= key.micro - 1}
            self._most = max(_MOST, 2 * len(self._used))
        return plain
