"""Facts that steps share if they repeat each other record by record."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Side

__all__ = ["ByPattern", "digest_of_records"]

Ints = npt.NDArray[np.int64]
_ValueT = TypeVar("_ValueT")
_PATTERNS_KEPT = 16


class ByPattern(Generic[_ValueT]):
    """Values by pattern, of the patterns that were used last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, _ValueT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, pattern: Hashable, make: Callable[[], _ValueT]) -> _ValueT:
        """Return the value of a pattern, which is made if there is none."""
        if pattern not in self._kept:
            self._kept[pattern] = make()
        self._kept.move_to_end(pattern)
        while len(self._kept) > _PATTERNS_KEPT:
            self._kept.popitem(last=False)
        return self._kept[pattern]

    def clear(self) -> None:
        self._kept.clear()


def digest_of_records(side: Side, rows: Ints, first_seen: Ints) -> bytes:
    """Return the same for records that repeat each other: their names, order, and which have the same tensor.

    first_seen: the first row of each record's tensor, counted from the first record.
    """
    columns = [names.codes[rows] for names in (side.module, side.kind, side.path)]
    columns += [side.call[rows], side.pass_number[rows], side.seq[rows] - side.seq[rows[0]], first_seen]
    found = blake2b(digest_size=16)
    for column in columns:
        found.update(np.ascontiguousarray(column, np.int64).data)
    return found.digest()
