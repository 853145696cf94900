"""Arrow columns of the index that repeat from step to step: most steps have the same slots and kinds in one order."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from tensortap.capture.recording.slots import RecordSlot
from tensortap.core.records import Location
from tensortap.frameworks.tensor_kind import TensorKind

__all__ = ["RepeatedColumns", "no_locations", "slot_values"]

_SLOT_COLUMNS = ("micro", "phase", "module", "call", "kind", "path")
_LOCATION = dict(zip(Location._fields, (pa.string(), pa.int64(), pa.int64()), strict=True))


class RepeatedColumns:
    """The columns of the last step, which are made anew if a step differs. Only one thread at a time uses them."""

    def __init__(self) -> None:
        self._slots: Sequence[RecordSlot] = ()
        self._slot_columns: Mapping[str, Any] = {}
        self._tensors: Sequence[TensorKind] = ()
        self._tensor_columns: Mapping[str, Any] = {}
        self._joined_slots, self._joined_tensors = _JoinedColumns(), _JoinedColumns()

    def of_slots(self, *steps: Sequence[RecordSlot]) -> Mapping[str, Any]:
        """Return the columns of the slots of some steps."""
        return self._joined_slots.of([self._of_slots(slots) for slots in steps])

    def of_tensors(self, *steps: Sequence[TensorKind]) -> Mapping[str, Any]:
        """Return the columns of dtypes and shapes, by the kinds of tensors of some steps."""
        return self._joined_tensors.of([self._of_tensors(kinds) for kinds in steps])

    def _of_slots(self, slots: Sequence[RecordSlot]) -> Mapping[str, Any]:
        if slots != self._slots:
            self._slot_columns = {name: _arrow(column) for name, column in slot_values(slots).items()}
            self._slots = slots
        return self._slot_columns

    def _of_tensors(self, kinds: Sequence[TensorKind]) -> Mapping[str, Any]:
        if kinds != self._tensors:
            offsets = np.cumsum([0, *(len(kind.shape) for kind in kinds)], dtype=np.int32)
            sizes = pa.array([size for kind in kinds for size in kind.shape], pa.int64())
            shapes = pa.ListArray.from_arrays(offsets, sizes)
            self._tensor_columns = {"dtype": pa.array([kind.name for kind in kinds], pa.string()), "shape": shapes}
            self._tensors = kinds
        return self._tensor_columns


class _JoinedColumns:
    """The columns of several steps, which are made anew unless as many steps with the same columns come again."""

    def __init__(self) -> None:
        self._steps: Sequence[Mapping[str, Any]] = ()
        self._columns: Mapping[str, Any] = {}

    def of(self, steps: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        if len(steps) == 1:
            return steps[0]
        if len(steps) != len(self._steps) or any(map(operator.is_not, steps, self._steps)):
            self._columns, self._steps = _joined(steps), steps
        return self._columns


def slot_values(slots: Sequence[RecordSlot]) -> dict[str, list[Any]]:
    """Return the values of slots, by column."""
    values = {name: [getattr(slot, name) for slot in slots] for name in _SLOT_COLUMNS}
    return {**values, "cls": [slot.site.cls for slot in slots]}


def no_locations(count: int) -> dict[str, Any]:
    """Return the columns of rows whose tensors are not kept."""
    return {name: pa.nulls(count, kind) for name, kind in _LOCATION.items()}


def _joined(steps: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the columns of several steps, one after the other."""
    columns = {name: [each[name] for each in steps] for name in steps[0]}
    return {
        name: pa.concat_arrays(parts) if all(isinstance(part, pa.Array) for part in parts) else [*chain(*parts)]
        for name, parts in columns.items()
    }


def _arrow(values: list[Any]) -> Any:
    try:
        return pa.array(values)
    except UnicodeEncodeError:
        return values  # the store escapes them
