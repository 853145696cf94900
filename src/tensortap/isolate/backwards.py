"""Gradients that one side sends in several backwards, one for each term of its loss, and the other in one.

Only their sum is comparable. If the reference has several, the model's one is measured against their sum; see
`ReferenceRecords.over_backwards`. If the model has several, what comes later is added to the first. So a backward that
runs twice, or not at all, shows.
"""

from __future__ import annotations

from collections.abc import Callable
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
    values: npt.NDArray[Any] | None
    """None if they are the recorded ones, or were too many to keep."""
    is_lost: bool = False
    """Whether they were too many to keep."""


class FirstParts:
    """The gradients of a step, each of which may be a part of the reference's, or be followed by another part."""

    def __init__(self) -> None:
        self._parts: dict[Key, PartialGradient] = {}
        self._bytes = 0
        self._added: set[Key] = set()

    def keep(self, part: PartialGradient) -> None:
        """Keep a gradient, with its values if it differs from the reference's."""
        if part.values is not None and self._bytes + part.values.nbytes > _MOST_BYTES:
            part = part._replace(values=None, is_lost=True)
        elif part.values is not None:
            self._bytes += part.values.nbytes
            part = part._replace(values=np.array(part.values))
        self._parts[part.key] = part

    def add(
        self, key: Key, values: npt.NDArray[Any], recorded: Callable[[Counterpart], npt.NDArray[Any]]
    ) -> PartialGradient | None:
        """Add a later part, whose path is numbered, to the first. Return the sum; None if there is no first."""
        first, _, number = key.path.partition("~")
        part = self._parts.get(key._replace(path=first)) if number else None
        if part is None or part.found.shape != values.shape:
            return None
        self._added.add(key)
        if not part.is_lost:
            before = recorded(part.found) if part.values is None else part.values
            wide = np.promote_types(before.dtype, np.float32)
            part = part._replace(values=(before.astype(wide) + values.astype(wide)).astype(before.dtype))
            self._parts[part.key] = part
        return part

    def was_added(self, key: Key) -> bool:
        return key in self._added

    def clear(self) -> None:
        self._parts.clear()
        self._added.clear()
        self._bytes = 0
