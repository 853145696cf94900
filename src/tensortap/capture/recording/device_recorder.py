"""Records tensors on a device: read there, now or together with others, and summarised when the results arrive."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from tensortap.capture import native_classes
from tensortap.capture.incidents.alarm import Alarm
from tensortap.capture.placement.placer import Placer
from tensortap.capture.placement.slot_placer import SlotPlacer, placed_token
from tensortap.capture.recording.deferred.pending import PendingRows, SecondRead
from tensortap.capture.recording.deferred.read_order import ReadOrder, ReadSlot, SnapshotRead
from tensortap.capture.recording.repeated_columns import RepeatedColumns
from tensortap.capture.recording.slots import RecordSlot, SlotTable
from tensortap.capture.selection import Keep
from tensortap.core.placement import Placement
from tensortap.core.records import Location
from tensortap.frameworks.base import Framework
from tensortap.frameworks.device_reader import DeferralBound, DeviceReader, SlotPlacement
from tensortap.store.format import RING_PREFIX
from tensortap.store.writer.rank_writer import RankWriter

__all__ = ["MOST_PENDING", "NOW", "Decision", "DeviceRecorder", "must_put", "name_in_file"]

MOST_PENDING = 4096
"""Rows of a step that wait together."""
Decision = tuple[ReadSlot | SnapshotRead | None, str]
"""When to read a tensor, and the bound on the delay if it is not read now."""
NOW: Decision = (None, "now")


class DeviceRecorder:
    """The part of a `Recorder` that records tensors on devices. `native/deferred.h` reads some of its attributes."""

    __slots__ = (
        "_device_columns",
        "_device_readers",
        "_framework",
        "_gather",
        "_gradients",
        "_in_snapshot",
        "_lock",
        "_numbers",
        "_pending",
        "_places",
        "_seq",
        "_writer",
        "alarm",
        "changed_unseen",
        "compares_gradients",
        "placer",
        "read_order",
        "slots",
    )

    def __init__(
        self,
        framework: Framework,
        writer: RankWriter,
        lock: AbstractContextManager[Any],
        gather: bool,
        placer: Placer | None,
    ) -> None:
        self._framework = framework
        self.slots = SlotTable()
        self._writer = writer
        self._gradients: dict[tuple[str, str], list[Any]] = {}
        """The param_grad of each parameter since its optimizer's last step: one entry, or two if there were more."""
        self._pending: PendingRows | None = None
        self._device_readers: list[DeviceReader] = []
        self._device_columns = RepeatedColumns()
        self._lock = lock
        """Held while anything is recorded."""
        self._gather = gather
        self._in_snapshot = False
        """Whether parameters and buffers are being read, one after the other."""
        self.read_order = ReadOrder()
        self._seq = 0
        self._numbers = count()
        self.placer = placer
        """Finds where in a whole each tensor sits; None in a run of one process."""
        self._places = None if placer is None else SlotPlacer(placer, framework, self.slots, writer)
        self.compares_gradients = True
        """Whether an optimizer's gradients are recorded, and compared with those of backward."""
        self.alarm: Alarm | None = None
        """Checks every summary for NaN, Inf and the loss."""
        self.changed_unseen: set[str] = set()
        """Modules with a tensor that changed without its framework knowing, so that its new bytes were not kept."""

    @property
    def uses_device(self) -> bool:
        """Whether summaries come from a device, later than their tensors."""
        return bool(self._device_readers)

    @property
    def records(self) -> int:
        """Number of records so far."""
        return self._seq

    def _note_gradient(self, slot: RecordSlot, seen: Any) -> None:
        """Take note of a param_grad, to recognise it in the optimizer's step."""
        if not self.compares_gradients:
            return
        gradients = self._gradients.setdefault((slot.module, slot.path.partition("~")[0]), [])
        if len(gradients) < 2:
            gradients.append(seen)

    def _decide(
        self,
        device_reader: DeviceReader,
        tensor: Any,
        slot: RecordSlot,
        step: int,
        place: SlotPlacement | None = None,
    ) -> Decision:
        """Return when to read a tensor on a device; see `ReadOrder.when`."""
        phase = slot.phase
        if slot.keep != "summary" or not self._gather:
            return NOW
        if phase == "state" and self._in_snapshot:
            return self.read_order.snapshot, "later"
        if phase != "backward" and phase != "forward":
            return NOW
        # A tensor without gradient may belong to other code, as an input from another stream, and change unseen. It is
        # read when it is first seen in a step; from then on, it is known. Compiled code computes without autograd, so
        # its tensors need no gradient.
        if phase == "forward" and not slot.in_graph and not self._framework.requires_gradient(tensor):
            token = device_reader.describe(tensor)[0]
            if self._pending is None or self._pending.device_reader is not device_reader:
                return NOW
            if token is None:
                return NOW
            token = placed_token(token, None if place is None else place.number)
            if self._pending.entries.find(token) < 0:
                return NOW
        return self.read_order.when(slot, step)

    def _record_later(
        self,
        device_reader: DeviceReader,
        tensor: Any,
        bound: DeferralBound,
        slot: RecordSlot,
        step: int,
        place: SlotPlacement | None = None,
    ) -> bool:
        """Record a tensor that is read together with others, if it can be. `native/deferred.h` does this for most."""
        if (kind := device_reader.deferrable(tensor, slot.likely)) is None:
            return False
        slot.likely = kind
        pending = self._pending_rows(device_reader)
        number = None if place is None else place.number
        # Parameters and buffers are read every time, as in `_record_here`.
        token = None if slot.phase == "state" else placed_token(device_reader.describe(tensor)[0], number)
        before = -1 if token is None else pending.entries.find(token)
        known = None if before < 0 else pending.entries[before]
        ticket = device_reader.submit_deferred(tensor, kind, bound, known, place)
        pending.append(self.slots.claim(slot, step), kind, ticket, step, self._seq, before, number)
        self._seq += 1
        if slot.kind == "param_grad":
            self._note_gradient(slot, (pending, len(pending) - 1))
        if before < 0 and token is not None:
            pending.entries.remember(tensor, token)
        return True

    def _record_there(
        self,
        device_reader: DeviceReader,
        slot: RecordSlot,
        step: int,
        tensor: Any,
        trial: ReadSlot | None = None,
        repeats: int | None = None,
        placement: Placement | None = None,
        place: SlotPlacement | None = None,
    ) -> None:
        """Record a tensor on its device.

        `trial` is the slot of a tensor that is also read again later. `repeats` is the row of a tensor of which this
        one may be a copy; a copy is dropped.
        """
        # This runs on the thread that launches the step, which must stay ahead of its device: keep calls few.
        pending = self._pending_rows(device_reader)
        token, kind, flat = device_reader.describe(tensor)
        if flat:
            slot.likely = kind
        keep = slot.keep
        if slot.phase == "state" and repeats is None:  # read every time, as in `_record_here`
            token = None
        placed = None
        if place is not None:
            placed = place.number
        elif placement is not None and self._places is not None:
            placed = self._places.number_of(placement)
        if placed is not None:
            token = None if token is None else placed_token(token, placed)
        before = -1 if token is None else pending.entries.find(token)
        if keep != "summary" and before >= 0 and must_put(pending.location(before), keep):
            device_reader.flush()  # its bytes are kept now, so its deferred read must not be missed
        ticket = device_reader.submit(tensor, None if before < 0 else pending.entries[before], flat, placement)
        if trial is not None and token is not None:
            device_reader.submit_trial(tensor, SecondRead(trial, pending, len(pending)), place)
        location, newly = None, False
        if keep != "summary":
            location = pending.location(before)
            if newly := must_put(location, keep):
                parts = device_reader.parts(tensor)
                location = self._writer.put_incoming(
                    name_in_file(slot), kind.name, kind.shape, parts, step=step, ring=keep == "ring"
                )
        pending.append(self.slots.claim(slot, step), kind, ticket, step, self._seq, before, placed)
        if location is not None:
            pending.keep(location, borrowed=not newly)
        if repeats is not None:
            pending.drop_if_equal(repeats)
        elif slot.kind == "param_grad":
            self._note_gradient(slot, (pending, len(pending) - 1))
        if token is not None and (before < 0 or newly):
            pending.entries.remember(tensor, token)
        self._seq += 1

    def _pending_rows(self, device_reader: DeviceReader) -> PendingRows:
        """Return the rows of this device, after sending those of another one."""
        pending = self._pending
        if pending is not None and pending.device_reader is device_reader and len(pending.entries) < MOST_PENDING:
            return pending
        if device_reader not in self._device_readers:
            self._device_readers.append(device_reader)
            device_reader.lock = self._lock
            native = native_classes.load_for_device(device_reader, MOST_PENDING)
            if native is not None:
                device_reader.use(native)
        if self._pending is not None:
            self.send()
        self._pending = PendingRows(device_reader, self._numbers, self._device_columns, self.changed_unseen, self.alarm)
        return self._pending

    def begin_snapshot(self) -> None:
        """Read parameters and buffers together from now on, because nothing else runs."""
        self._in_snapshot = True

    def end_snapshot(self) -> None:
        self._in_snapshot = False
        self.flush_reads()

    def flush_reads(self) -> None:
        """Run all deferred reads, because a forward or a step is over."""
        for device_reader in self._device_readers:
            device_reader.flush()

    def discard_deferred(self) -> None:
        """Release all deferred tensors, because the recording has stopped."""
        for device_reader in self._device_readers:
            device_reader.discard_deferred()

    def code_changed(self) -> None:
        """Try anew which reads can be deferred: other compiled code uses memory in another way."""
        self.flush_reads()
        self.read_order.restart()

    def close(self) -> None:
        """Release the devices."""
        for device_reader in self._device_readers:
            device_reader.close()

    def send(self) -> None:
        """Start to copy the devices' results to the host, and give all rows to the index."""
        for device_reader in self._device_readers:
            device_reader.end_step()
        self._end_host_step()
        if self._pending is not None:
            self._pending.seal()  # results on a device may be overwritten now
            if len(self._pending):  # there is none if the first tensor failed
                self._writer.append_rows(self._pending)
            self._pending = None

    def _end_host_step(self) -> None:
        """Give the rows of tensors in host memory to the index, and recognise none of them later."""


def must_put(location: Location | None, keep: Keep) -> bool:
    """Return whether a tensor that may be stored already must be stored: a ring's copy does not last."""
    return location is None or (keep == "tensors" and location.file.startswith(RING_PREFIX))


def name_in_file(slot: RecordSlot) -> str:
    """Return the tensor's name in its safetensors file, for readers other than tensortap."""
    mode = "eval" if slot.phase == "eval" else "micro"
    return f"{slot.module or '(root)'}/{slot.kind}/{slot.path}/{mode}_{slot.micro}/call_{slot.call}"
