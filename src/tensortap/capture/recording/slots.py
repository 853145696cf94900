"""Slots: the identities of records without their step, which repeat from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensortap.capture.modules.tree import Site
from tensortap.capture.selection import Keep
from tensortap.core.records import Key
from tensortap.frameworks.device_reader import SlotPlacement
from tensortap.frameworks.tensor_kind import TensorKind

__all__ = ["RecordSlot", "SlotTable", "by_key"]

_MOST = 100_000


class RecordSlot:
    """A record as it occurs in every step. Creating a slot takes longer than all other work for a record."""

    __slots__ = (
        "call",
        "in_graph",
        "keep",
        "kind",
        "likely",
        "micro",
        "module",
        "path",
        "phase",
        "place",
        "read",
        "site",
        "used",
    )

    def __init__(
        self, micro: int, phase: str, site: Site, call: int, kind: str, path: str, keep: Keep, module: str
    ) -> None:
        self.micro = micro
        self.phase = phase
        self.module = module
        self.call = call
        self.kind = kind
        self.path = path
        self.site = site
        self.keep: Keep = keep
        self.used = -1
        """The last step that had this record."""
        self.likely: TensorKind | None = None
        """The kind of its last tensor, if that was a plain one."""
        self.in_graph = False
        """Whether the slot's last tensor was made by compiled code, and is held by no other code."""
        self.read: Any = None
        """When to read its tensors on a device, see `deferred.read_order`; None until the first of them came."""
        self.place: SlotPlacement | None = None
        """The placement of its last tensor on a device, in a run of several processes."""

    def key(self, step: int) -> Key:
        """Return the identity of this slot's record in a step."""
        return Key(step, self.micro, self.phase, self.module, self.call, self.kind, self.path)


class SlotTable:
    """All slots of a tap."""

    def __init__(self) -> None:
        self._slots: dict[tuple[Any, ...], RecordSlot] = {}
        self._most = _MOST

    def find(
        self,
        micro: int,
        phase: str,
        site: Site,
        call: int,
        kind: str,
        path: str,
        keep: Keep,
        module: str | None = None,
    ) -> RecordSlot:
        """Return the slot of a record, a new one if it is the first of its kind.

        `module` is the name in the identity; None if that is the site's own.
        """
        module = site.name if module is None else module
        where = micro, phase, module, call, kind, path
        known = self._slots.get(where)
        if known is not None and known.site is site:
            return known
        slot = self._slots[where] = RecordSlot(micro, phase, site, call, kind, path, keep, module)
        if known is not None:  # another module has that name now
            slot.used = known.used
        if len(self._slots) > self._most:
            self._drop_old(micro)
        return slot

    def claim(self, slot: RecordSlot, step: int) -> RecordSlot:
        """Return the slot for a record of this step.

        If the step has that record already, as in a second backward through one graph, return a slot with a ~2 in its
        path.
        """
        number = 1
        free = slot
        while free.used == step:
            number += 1
            path = f"{slot.path}~{number}"
            free = self.find(slot.micro, slot.phase, slot.site, slot.call, slot.kind, path, slot.keep, slot.module)
        free.used = step
        return free

    def _drop_old(self, micro: int) -> None:
        """Drop slots of early micro steps: a loop that never ends its step must not grow for ever."""
        self._slots = {where: slot for where, slot in self._slots.items() if slot.micro >= micro - 1}
        self._most = max(_MOST, 2 * len(self._slots))


def by_key(record: Callable[[Any, Key, Site, Keep], None]) -> Callable[[Any, RecordSlot, int], None]:
    """Return a function that records tensors by slot and step, where `record` takes keys."""

    def record_slot(tensor: Any, slot: RecordSlot, step: int) -> None:
        record(tensor, slot.key(step), slot.site, slot.keep)

    return record_slot
