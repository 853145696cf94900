"""Rows of the index for small tensors in host memory, from their copies to their summaries.

A tensor is copied when it comes, once however often the step shows it. The thread that writes the index summarises all
copies of a step together, and makes the columns of their rows: nothing of that delays the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tensortap.capture.alarm import Alarm
from tensortap.capture.slots import RecordSlot
from tensortap.core.records import Location
from tensortap.frameworks.base import Framework, HostMemory
from tensortap.kernels.summary.batch import SummaryBatch

__all__ = ["CopiedTensor", "HostRows", "SlotColumns", "TensorCopies"]

_MOST_KNOWN = 100_000
_SLOT_COLUMNS = ("micro", "phase", "module", "call", "kind", "path")


class CopiedTensor:
    """A tensor of this step, by its copy."""

    __slots__ = ("batch", "dtype", "number", "row", "shape")

    def __init__(self, number: int, batch: SummaryBatch, row: int, dtype: str, shape: tuple[int, ...]) -> None:
        self.number = number
        self.batch = batch
        self.row = row
        self.dtype = dtype
        self.shape = shape


class TensorCopies:
    """Copies tensors of at most MOST_COPIED bytes, and recognises those that the step has shown before."""

    def __init__(self, framework: Framework, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._batch: SummaryBatch | None = None
        self._known: dict[Hashable, CopiedTensor] = {}
        self._held = framework.hold_tokens()

    def take(self, tensor: Any, memory: HostMemory, remembered: bool) -> CopiedTensor:
        """Return the copy of a tensor, which was made before if the step has shown it unchanged.

        Without `remembered`, it is read anew, and later sightings are not recognised.
        """
        token, address, elements, nbytes, layout, dtype, shape = memory
        if remembered and (known := self._known.get(token)) is not None and known.batch.is_copy(known.row, address):
            return known
        batch = self._batch
        row = None if batch is None else batch.add(address, elements, nbytes, layout)
        if batch is None or row is None:
            batch = self._batch = SummaryBatch()
            row = batch.add(address, elements, nbytes, layout)
            assert row is not None, "a new batch has room for the largest copy"
        copied = CopiedTensor(next(self._numbers), batch, row, dtype, shape)
        if remembered and token is not None:
            if len(self._known) == _MOST_KNOWN:
                self.forget()
            self._known[token] = copied
            self._held.add(tensor)
        return copied

    @staticmethod
    def is_copy(copied: CopiedTensor, memory: HostMemory) -> bool:
        """Return whether a tensor has the same elements as one that was copied."""
        same_kind = memory[5] == copied.dtype and memory[6] == copied.shape
        return same_kind and copied.batch.is_copy(copied.row, memory[1])

    def finish_batch(self) -> None:
        """Add nothing to the newest batch from now on: its summaries are computed on another thread."""
        self._batch = None

    def forget(self) -> None:
        """Recognise no tensor from before: one that outlives its step may change unseen."""
        self._known.clear()
        self._held.clear()


class SlotColumns:
    """Arrow columns of what a step's slots say. Most steps have the same slots in the same order as the one before."""

    def __init__(self) -> None:
        self._slots: Sequence[RecordSlot] = ()
        self._columns: Mapping[str, Any] = {}

    def of(self, slots: Sequence[RecordSlot]) -> Mapping[str, Any]:
        """Return the columns of these slots. Only the thread that writes the index calls this."""
        if slots != self._slots:
            self._columns = {name: _arrow(column) for name, column in _values(slots).items()}
            self._slots = slots
        return self._columns


class HostRows:
    """The rows of one step, in the order in which the tensors came. Implements `store.writer.index.Rows`."""

    may_wait = False

    def __init__(self, step: int, slot_columns: SlotColumns, alarm: Alarm | None) -> None:
        self.step = step
        self._slot_columns = slot_columns
        self._alarm = alarm
        self.entries: list[tuple[RecordSlot, CopiedTensor, int]] = []
        """The slot, tensor and seq of each row."""
        self._made: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.entries)

    def arrive(self) -> None:
        """Return at once: the copies are here."""

    def show_alarm(self) -> None:
        """Compute the rows now and show them to the alarm, which decides at the end of the step."""
        if self._alarm is not None:
            self._alarm.saw_columns({**self._summaries(), **_values(self._slots())})

    def columns(self) -> Mapping[str, Any]:
        return {**self._summaries(), **self._slot_columns.of(self._slots())}

    def _slots(self) -> list[RecordSlot]:
        return [slot for slot, _, _ in self.entries]

    def _summaries(self) -> Mapping[str, Any]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> dict[str, Any]:
        tensors, count = [tensor for _, tensor, _ in self.entries], len(self.entries)
        batches = list(dict.fromkeys(tensor.batch for tensor in tensors))
        starts, size = {}, 0
        for batch in batches:
            starts[batch] = size
            size += len(batch)
        places = np.array([starts[tensor.batch] + tensor.row for tensor in tensors])
        summaries = [batch.columns() for batch in batches]
        columns: dict[str, Any] = {
            name: np.concatenate([each[name] for each in summaries]).take(places, axis=0) for name in summaries[0]
        }
        columns["step"] = np.full(count, self.step)
        columns["seq"] = np.array([seq for _, _, seq in self.entries])
        columns["dtype"] = [tensor.dtype for tensor in tensors]
        columns["shape"] = _shapes([tensor.shape for tensor in tensors])
        columns["tensor"] = [tensor.number for tensor in tensors]
        columns |= {name: pa.nulls(count, kind) for name, kind in _NO_LOCATION.items()}
        return columns


def _values(slots: Sequence[RecordSlot]) -> dict[str, list[Any]]:
    values = {name: [getattr(slot, name) for slot in slots] for name in _SLOT_COLUMNS}
    return {**values, "cls": [slot.site.cls for slot in slots]}


def _arrow(values: list[Any]) -> Any:
    try:
        return pa.array(values)
    except UnicodeEncodeError:
        return values  # the store escapes them


def _shapes(shapes: Sequence[tuple[int, ...]]) -> Any:
    offsets = np.cumsum([0, *map(len, shapes)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array([size for shape in shapes for size in shape], pa.int64()))


_NO_LOCATION = dict(zip(Location._fields, (pa.string(), pa.int64(), pa.int64()), strict=True))
