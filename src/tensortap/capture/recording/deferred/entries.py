"""The rows of a step's tensors on a device, and which tensors they are of."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Any, cast

from tensortap.capture import native_classes
from tensortap.capture.recording.slots import RecordSlot
from tensortap.frameworks.device_reader import DeviceReader, TokenHold
from tensortap.frameworks.tensor_kind import TensorKind

__all__ = ["DeviceEntries", "new_device_entries"]


class DeviceEntries:
    """The rows, in the order in which the tensors came: a sequence of tickets. `native/rows.h` is the same in C."""

    def __init__(self, hold: TokenHold) -> None:
        self.slots: list[RecordSlot] = []
        self.kinds: list[TensorKind] = []
        self._tickets: list[Any] = []
        self._numbers = array("q")
        self._known: dict[Hashable, int] = {}
        """Row of a tensor that may be seen again, by token."""
        self._held = hold

    def __len__(self) -> int:
        return len(self._tickets)

    def __getitem__(self, row: int) -> Any:
        return self._tickets[row]

    def append(
        self, slot: RecordSlot, kind: TensorKind, ticket: Any, step: int, seq: int, before: int, placement: int
    ) -> None:
        """Add a row. `before` is the row of the earlier sighting, and `placement` a number of the writer; else -1."""
        self.slots.append(slot)
        self.kinds.append(kind)
        self._tickets.append(ticket)
        self._numbers.extend((step, seq, before, placement))

    def numbers(self) -> Any:
        """Return step, seq, `before` and `placement` of each row, in 8 bytes each."""
        return self._numbers

    def find(self, token: Hashable) -> int:
        """Return the row of a tensor; -1 if the step has not shown it."""
        return self._known.get(token, -1)

    def remember(self, tensor: Any, token: Hashable) -> None:
        """Let later sightings of the tensor refer to the newest row."""
        self._known[token] = len(self._tickets) - 1
        self._held.add(tensor)

    def forget(self, token: Hashable) -> None:
        """Treat the tensor as another one from now on."""
        self._known.pop(token, None)

    def release(self) -> None:
        """Forget all tensors. Nothing is added from now on."""
        self._known.clear()
        self._held.clear()


def new_device_entries(device_reader: DeviceReader) -> DeviceEntries:
    """Return rows for the tensors of a device."""
    native = None if device_reader.native_reads is None else native_classes.load()
    if native is None:
        return DeviceEntries(device_reader.hold_tokens())
    return cast(DeviceEntries, native.DeviceEntries(device_reader.hold_tokens()))
