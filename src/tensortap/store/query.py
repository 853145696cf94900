"""Filters of an index, applied to whole columns before any record is built."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Filter"]

_GLOBBED = ("module", "path", "cls")


@dataclass(frozen=True, slots=True)
class Filter:
    """Each field is None for all, one value, or a container of values. Module, path and class are globs."""

    step: int | Container[int] | None = None
    micro: int | Container[int] | None = None
    phase: str | Container[str] | None = None
    module: str | Container[str] | None = None
    call: int | Container[int] | None = None
    kind: str | Container[str] | None = None
    path: str | Container[str] | None = None
    cls: str | Container[str] | None = None
    dtype: str | Container[str] | None = None
    tensor: int | Container[int] | None = None
    nonfinite: bool = False
    """Only tensors that have a NaN or an infinity."""
    kept: bool = False
    """Only tensors whose bytes were kept."""

    def rows(self, table: Any) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows that pass, ascending."""
        mask: Any = None
        for field in fields(self):
            wanted = getattr(self, field.name)
            if wanted is None or isinstance(wanted, bool):
                continue
            mask = _both(mask, _matching(table.column(field.name), field.name, wanted))
        if self.nonfinite:
            bad = pc.add(pc.add(table.column("nan"), table.column("posinf")), table.column("neginf"))
            mask = _both(mask, pc.greater(bad, 0))
        if self.kept:
            mask = _both(mask, pc.is_valid(table.column("file")))
        if mask is None:
            return np.arange(table.num_rows)
        return np.flatnonzero(mask.to_numpy())


def _matching(column: Any, name: str, wanted: Any) -> Any:
    """Return a mask of the matching rows. Columns have few distinct values, so any Python container can be asked."""
    values = pc.unique(column).to_pylist()
    chosen = [value for value in values if _meant(name, value, wanted)]
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return pc.is_in(column, pa.array(chosen, kind))


def _meant(name: str, value: Any, wanted: Any) -> bool:
    if name in _GLOBBED and isinstance(wanted, (str, list, tuple, set, frozenset)):
        globs = (wanted,) if isinstance(wanted, str) else wanted
        return any(value == glob or fnmatchcase(value, glob) for glob in globs)
    if isinstance(wanted, (int, str)):
        return bool(value == wanted)
    return value in wanted


def _both(left: Any, right: Any) -> Any:
    return right if left is None else pc.and_(left, right)
