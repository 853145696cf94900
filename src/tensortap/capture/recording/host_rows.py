"""Rows of the index for plain tensors in host memory, from their copies to their summaries.

A small tensor is copied when it comes, and a large one read, once however often the step shows it. The thread that
writes the index summarises all copies of a step together, and makes the columns of the rows, without delaying the step.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from tensortap.capture import native_classes
from tensortap.capture.incidents.alarm import Alarm
from tensortap.capture.recording.repeated_columns import RepeatedColumns, no_locations, slot_values
from tensortap.capture.recording.slots import RecordSlot
from tensortap.frameworks.base import HostMemory
from tensortap.frameworks.device_reader import TokenHold
from tensortap.frameworks.tensor_kind import TensorKind
from tensortap.kernels.summary.batch import MOST_COPIED, MOST_ROWS, READ_LIMITS, SummaryBatch

__all__ = ["CopiedTensor", "HostRows", "RowEntries", "TensorCopies", "new_copies", "new_entries", "take_changed"]

_MOST_GATHERED = 2
"""Batches of a step that may wait for later steps: each of them holds a megabyte of copies."""
_MOST_KNOWN = 100_000
"""Tensors of a step that are recognised when they come again."""


class CopiedTensor:
    """A tensor of this step, by its copy, or by the record of a large one."""

    __slots__ = ("batch", "kind", "number", "row")

    def __init__(self, number: int, batch: SummaryBatch, row: int, kind: TensorKind) -> None:
        self.number = number
        self.batch = batch
        self.row = row
        self.kind = kind


class TensorCopies:
    """Copies or reads tensors of at most MOST_READ elements, and recognises those that the step has shown before."""

    def __init__(self, hold: TokenHold, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._batch: SummaryBatch | None = None
        self._known: dict[Hashable, CopiedTensor] = {}
        self._held = hold

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
            if len(self._known) == _MOST_KNOWN:
                self.forget()
            self._known[token] = copied
            self._held.add(tensor)
        return copied

    def finish_batch(self) -> None:
        """Add nothing to the newest batch from now on: its summaries are computed on another thread."""
        self._batch = None

    def forget_one(self, memory: HostMemory) -> None:
        """Do not recognise this tensor: a few elements of a large one may not show that its memory was reused."""
        self._known.pop(memory[2], None)

    def forget(self) -> None:
        """Recognise no tensor from before: one that outlives its step may change unseen."""
        self._known.clear()
        self._held.clear()


class RowEntries:
    """The rows of a step, in the order in which the tensors came."""

    def __init__(self) -> None:
        self.slots: list[RecordSlot] = []
        self.kinds: list[TensorKind] = []
        self.batches: list[SummaryBatch] = []
        self._numbers = array("q")

    def __len__(self) -> int:
        return len(self.slots)

    def append(self, slot: RecordSlot, copied: CopiedTensor, seq: int) -> None:
        if copied.batch not in self.batches:
            self.batches.append(copied.batch)
        self.slots.append(slot)
        self.kinds.append(copied.kind)
        self._numbers.extend((self.batches.index(copied.batch), copied.row, copied.number, seq))

    def numbers(self) -> Any:
        """Return four numbers of each row: the place of its batch, its row there, the tensor's number, its seq."""
        return self._numbers


class HostRows:
    """The rows of a step, or of several. Implements `store.writer.index.Rows`."""

    __slots__ = ("_alarm", "_made", "_others", "_repeated", "entries", "step")
    may_wait = False

    def __init__(self, step: int, entries: RowEntries, repeated: RepeatedColumns, alarm: Alarm | None) -> None:
        self.step = step
        self.entries = entries
        self._repeated = repeated
        self._alarm = alarm
        self._others: Sequence[HostRows] = ()
        self._made: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return sum(len(rows.entries) for rows in (self, *self._others))

    @property
    def gathers(self) -> bool:
        return len(self.entries.batches) <= _MOST_GATHERED

    def join(self, others: Sequence[Any]) -> None:
        self._others = others

    def arrive(self) -> None:
        """Return at once: the copies are here."""

    def show_alarm(self) -> None:
        """Compute the rows now and show them to the alarm, which decides at the end of the step."""
        if self._alarm is not None:
            dtypes = [kind.name for kind in self.entries.kinds]
            self._alarm.saw_columns({**self._summaries(), **slot_values(self.entries.slots), "dtype": dtypes})

    def columns(self) -> Mapping[str, Any]:
        parts = self, *self._others
        summaries = [rows._summaries() for rows in parts]
        columns = {name: np.concatenate([each[name] for each in summaries]) for name in summaries[0]}
        columns |= self._repeated.of_slots(*(rows.entries.slots for rows in parts))
        columns |= self._repeated.of_tensors(*(rows.entries.kinds for rows in parts))
        return {**columns, **no_locations(len(self))}

    def _summaries(self) -> Mapping[str, Any]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> dict[str, Any]:
        entries, count = self.entries, len(self.entries)
        numbers = np.frombuffer(entries.numbers(), np.int64).reshape(count, 4)
        starts = np.cumsum([0, *map(len, entries.batches)])
        places = starts[numbers[:, 0]] + numbers[:, 1]
        summaries = [batch.columns() for batch in entries.batches]
        columns: dict[str, Any] = {
            name: np.concatenate([each[name] for each in summaries]).take(places, axis=0) for name in summaries[0]
        }
        columns["step"] = np.full(count, self.step)
        columns["tensor"], columns["seq"] = numbers[:, 2], numbers[:, 3]
        return columns


def new_copies(hold: TokenHold, numbers: Iterator[int], quick: bool) -> TensorCopies:
    """Return the object that copies small tensors. `quick` asks for the one in C."""
    if not quick or (native := native_classes.load()) is None:
        return TensorCopies(hold, numbers)
    return cast(TensorCopies, native.Copies(hold, numbers, MOST_ROWS, _MOST_KNOWN, *READ_LIMITS))


def new_entries(copies: TensorCopies) -> RowEntries:
    """Return rows for these copies."""
    if isinstance(copies, TensorCopies):
        return RowEntries()
    native = native_classes.load()
    assert native is not None, "the copies are of its own"
    return cast(RowEntries, native.Entries())


def take_changed(copies: TensorCopies, tensor: Any, memory: HostMemory, before: CopiedTensor) -> CopiedTensor | None:
    """Return the copy of a tensor; None if it has the same elements as one that was copied before."""
    kind, address, _ = memory
    same_kind = kind.name == before.kind.name and kind.shape == before.kind.shape
    if kind.nbytes <= MOST_COPIED:
        same = same_kind and before.batch.is_copy(before.row, address)
        return None if same else copies.take(tensor, memory, False)
    found = copies.take(tensor, memory, True)
    same = same_kind and found.batch.digest(found.row) == before.batch.digest(before.row)
    return None if same else found
