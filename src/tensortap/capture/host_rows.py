"""Rows of the index for small tensors in host memory, from their copies to their summaries.

A tensor is copied when it comes, once however often the step shows it. The thread that writes the index summarises all
copies of a step together, and makes the columns of their rows: nothing of that delays the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np

from tensortap.capture.alarm import Alarm
from tensortap.capture.repeated_columns import RepeatedColumns, no_locations, slot_values
from tensortap.capture.slots import RecordSlot
from tensortap.frameworks.base import Framework, HostMemory
from tensortap.frameworks.tensor_kind import TensorKind
from tensortap.kernels.summary.batch import SummaryBatch

__all__ = ["MOST_REMEMBERED", "CopiedTensor", "HostRows", "TensorCopies"]

MOST_REMEMBERED = 100_000
"""Tensors of a step that are recognised when they come again."""


class CopiedTensor:
    """A tensor of this step, by its copy."""

    __slots__ = ("batch", "kind", "number", "row")

    def __init__(self, number: int, batch: SummaryBatch, row: int, kind: TensorKind) -> None:
        self.number = number
        self.batch = batch
        self.row = row
        self.kind = kind


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
        kind, address, token = memory
        if remembered and (known := self._known.get(token)) is not None and known.batch.is_copy(known.row, address):
            return known
        batch = self._batch
        row = None if batch is None else batch.add(address, kind.elements, kind.nbytes, kind.layout)
        if batch is None or row is None:
            batch = self._batch = SummaryBatch()
            row = batch.add(address, kind.elements, kind.nbytes, kind.layout)
            assert row is not None, "a new batch has room for the largest copy"
        copied = CopiedTensor(next(self._numbers), batch, row, kind)
        if remembered and token is not None:
            if len(self._known) == MOST_REMEMBERED:
                self.forget()
            self._known[token] = copied
            self._held.add(tensor)
        return copied

    @staticmethod
    def is_copy(copied: CopiedTensor, memory: HostMemory) -> bool:
        """Return whether a tensor has the same elements as one that was copied."""
        kind, address, _ = memory
        same_kind = kind.name == copied.kind.name and kind.shape == copied.kind.shape
        return same_kind and copied.batch.is_copy(copied.row, address)

    def finish_batch(self) -> None:
        """Add nothing to the newest batch from now on: its summaries are computed on another thread."""
        self._batch = None

    def forget(self) -> None:
        """Recognise no tensor from before: one that outlives its step may change unseen."""
        self._known.clear()
        self._held.clear()


class HostRows:
    """The rows of one step, in the order in which the tensors came. Implements `store.writer.index.Rows`."""

    may_wait = False

    def __init__(self, step: int, repeated: RepeatedColumns, alarm: Alarm | None) -> None:
        self.step = step
        self._repeated = repeated
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
            dtypes = [tensor.kind.name for _, tensor, _ in self.entries]
            self._alarm.saw_columns({**self._summaries(), **slot_values(self._slots()), "dtype": dtypes})

    def columns(self) -> Mapping[str, Any]:
        return {**self._summaries(), **self._repeated.of_slots(self._slots())}

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
        columns |= self._repeated.of_kinds(
            [tensor.kind.name for tensor in tensors], [tensor.kind.shape for tensor in tensors]
        )
        columns["tensor"] = [tensor.number for tensor in tensors]
        columns |= no_locations(count)
        return columns
