"""Placements of slots: the placement of a record usually holds for the same record of the next step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from tensortap.capture.placement.placer import Placer
from tensortap.capture.recording.slots import RecordSlot, SlotTable
from tensortap.core.placement import Placement
from tensortap.frameworks.base import Framework
from tensortap.frameworks.device_reader import DeviceReader, SlotPlacement
from tensortap.store.writer.rank_writer import RankWriter

__all__ = ["SlotPlacer", "placed_token"]


class SlotPlacer:
    """Places the records of one process of several."""

    __slots__ = ("_framework", "_numbers", "_placer", "_slots", "_writer")

    def __init__(self, placer: Placer, framework: Framework, slots: SlotTable, writer: RankWriter) -> None:
        self._placer = placer
        self._framework = framework
        self._slots = slots
        self._writer = writer
        self._numbers: set[int] = set()

    def place(self, tensor: Any, slot: RecordSlot, step: int) -> Placement | None:
        """Return the placement of a record; None if it is not known."""
        return self._placer.place(tensor, self._framework.local_shape(tensor), slot.key(step), slot.site)

    def place_there(
        self, device_reader: DeviceReader, tensor: Any, slot: RecordSlot, step: int
    ) -> SlotPlacement | None:
        """Return the placement of a tensor on a device: that of the slot's last one, if nothing says otherwise.

        Return None if the record has another name in the whole.
        """
        shape, place = self._framework.local_shape(tensor), slot.place
        plain = type(tensor) in self._framework.plain_tensors
        last = place if plain and place is not None and place.shape == shape else None
        if last is not None and self._placer.is_current(last, slot.kind, step, slot.micro):
            return last
        if self.slot_in_whole(slot, step) is not slot:
            return None
        placement = self.place(tensor, slot, step)
        number, base = None, 0 if plain else None
        if placement is not None:
            number = self.number_of(placement)
            base = device_reader.base_of(tensor, placement) if plain else None
        batch = None if self._placer.batch is None else self._placer.batch[2]
        place = SlotPlacement(placement, number, base, shape, batch)
        slot.place = place if self._placer.follows_from_shape(tensor) else None
        return place

    def slot_in_whole(self, slot: RecordSlot, step: int) -> RecordSlot:
        """Return the slot of a record under the name that its module has among those of all stages."""
        module = self._placer.key_in_whole(slot.key(step)).module
        if module == slot.module:
            return slot
        return self._slots.find(slot.micro, slot.phase, slot.site, slot.call, slot.kind, slot.path, slot.keep, module)

    def number_of(self, placement: Placement) -> int:
        """Return the number of a placement in the run."""
        number = self._writer.number_of(placement)
        self._numbers.add(number)
        return number

    def tokens(self, token: Hashable) -> Iterator[Hashable]:
        """Yield the identity of a tensor with each placement that any tensor had."""
        for number in self._numbers:
            yield placed_token(token, number)


def placed_token(token: Hashable, number: int | None) -> Hashable:
    """Return the identity of a tensor that has the placement of this number: with another one, it is read again."""
    return token if number is None else (number, token)
