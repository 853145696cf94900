"""Gradients that one side sends in several backwards, one for each term of its loss, and the other in one.

Only their sum is comparable. If the reference has several, the model's one is measured against their sum; see
`ReferenceRecords.over_backwards`. If the model has several, the first is kept, as long as it differs from the
reference's, and what comes later is added to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core.records import Key
from tensortap.isolate.reference import Counterpart

__all__ = ["FirstParts", "PartialGradient"]

_MOST_BYTES = 1 << 30
"""Gradients that are kept at most; further ones are measured by themselves."""


class PartialGradient(NamedTuple):
    """The sum of a gradient's parts so far, and its record in the reference."""

    key: Key
    row: int
    found: Counterpart
    values: npt.NDArray[Any]


class FirstParts:
    """The gradients of a step that differ from the reference's, and may be parts of it."""

    def __init__(self) -> None:
        self._parts: dict[Key, PartialGradient] = {}
        self._bytes = 0
        self._added: set[Key] = set()

    def keep(self, part: PartialGradient) -> None:
        """Keep a gradient that differs from the reference's."""
        size = part.values.nbytes
        if self._bytes + size <= _MOST_BYTES:
            self._bytes += size
            self._parts[part.key] = part._replace(values=np.array(part.values))

    def add(self, key: Key, values: npt.NDArray[Any]) -> PartialGradient | None:
        """Add a later part, whose path is numbered, to the first. Return the sum; None if the first was not kept."""
        first, _, number = key.path.partition("~")
        part = self._parts.get(key._replace(path=first)) if number else None
        if part is None or part.values.shape != values.shape:
            return None
        self._added.add(key)
        wide = np.promote_types(part.values.dtype, np.float32)
        total = (part.values.astype(wide) + values.astype(wide)).astype(part.values.dtype)
        self._parts[part.key] = part._replace(values=total)
        return self._parts[part.key]

    def was_added(self, key: Key) -> bool:
        return key in self._added

    def clear(self) -> None:
        self._parts.clear()
        self._added.clear()
        self._bytes = 0
