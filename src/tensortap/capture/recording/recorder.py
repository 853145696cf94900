"""Turns tensors into records: each tensor is read, summarised and stored once, however often it is seen.

Small tensors in host memory are copied and summarised later, others at once. Tensors on a device are read there, and
their summaries arrive later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from tensortap.capture import native_classes
from tensortap.capture.placement.placer import Placer
from tensortap.capture.placement.slot_placer import SlotPlacer
from tensortap.capture.recording.deferred.read_order import ReadSlot
from tensortap.capture.recording.device_recorder import (
    MOST_PENDING,
    NOW,
    Decision,
    DeviceRecorder,
    must_put,
    name_in_file,
)
from tensortap.capture.recording.host_rows import CopiedTensor, HostRows, new_copies, new_entries, take_changed
from tensortap.capture.recording.repeated_columns import RepeatedColumns
from tensortap.capture.recording.seen_tensors import SeenTensor, SeenTensors
from tensortap.capture.recording.slots import RecordSlot
from tensortap.core import dtypes, statistics
from tensortap.core.placement import Placement
from tensortap.core.records import Record
from tensortap.frameworks.base import Framework
from tensortap.frameworks.device_reader import DeviceReader
from tensortap.kernels import summarize
from tensortap.kernels.summary.batch import MOST_COPIED, MOST_READ
from tensortap.kernels.summary.probe import probe
from tensortap.store.writer.rank_writer import RankWriter

__all__ = ["Recorder"]


class Recorder(DeviceRecorder):
    """Writes records of tensors into a run. `native/taker.h` reads some of its attributes."""

    __slots__ = ("_copies", "_copies_small", "_decided", "_host_rows", "_known", "_rank", "_repeated")

    def __init__(
        self,
        framework: Framework,
        writer: RankWriter,
        rank: int,
        lock: AbstractContextManager[Any],
        gather: bool = True,
        placer: Placer | None = None,
    ) -> None:
        super().__init__(framework, writer, lock, gather, placer)
        self._rank = rank
        self._known = SeenTensors()
        self._decided: Decision | None = None
        """The decision of `take` on the current tensor."""
        self._host_rows: HostRows | None = None
        self._repeated = RepeatedColumns()
        self._copies_small = not statistics.added()
        """Whether small tensors may be summarised later. Statistics that were added need the tensor itself."""
        quick = self._copies_small and bool(framework.plain_tensors)
        self._copies = new_copies(framework.hold_tokens(), self._numbers, quick)

    def take(self, tensor: Any, slot: RecordSlot, step: int) -> bool:
        """Record a tensor the quick way, if it has one: a plain tensor in host memory, or one whose read may wait.

        This runs first for every tensor between the calls of a model, and for most it is all that runs. If it returns
        False, the caller records the tensor now.
        """
        self._decided = None
        if self._places is not None:
            return self._take_placed(self._places, tensor, slot, step)
        if slot.keep == "summary" and self._copies_small:
            memory = self._framework.host_memory(tensor, slot.likely)
            if memory is None and (gathered := self._framework.gathered(tensor, MOST_COPIED)) is not None:
                memory = gathered[1]
            fits = memory is not None and memory[0].elements <= MOST_READ
            if memory is not None and fits and self._framework.device_reader(tensor) is None:
                slot.likely = memory[0]
                # Parameters and buffers are read every time: fused optimizers, for example, do not count versions.
                copied = self._copies.take(tensor, memory, slot.phase != "state")
                if slot.kind == "param_grad":
                    self._note_gradient(slot, copied)
                self._append_copy(slot, copied, step)
                return True
        if not self._device_readers:  # none is made here: a CUDA graph may be being captured
            return False
        if (device_reader := self._framework.device_reader(tensor)) is None:
            return False
        read, when = self._decided = self._decide(device_reader, tensor, slot, step)
        return read is not None and when == "later" and self._record_later(device_reader, tensor, read, slot, step)

    def _take_placed(self, places: SlotPlacer, tensor: Any, slot: RecordSlot, step: int) -> bool:
        """Variant of `take` for a run of several processes. Small tensors in host memory have no quick way there."""
        if not self._device_readers or type(tensor) not in self._framework.plain_tensors:
            return False
        if (device_reader := self._framework.device_reader(tensor)) is None:
            return False
        place = places.place_there(device_reader, tensor, slot, step)
        if place is None or place.base is None:
            return False
        read, when = self._decided = self._decide(device_reader, tensor, slot, step, place)
        return (
            read is not None and when == "later" and self._record_later(device_reader, tensor, read, slot, step, place)
        )

    def quickest_take(self) -> Callable[[Any, RecordSlot, int], bool]:
        """Return `take`, or a faster function with the same effect."""
        native = native_classes.load()
        if native is None or not isinstance(self._copies, native.Copies):
            return self.take
        most = MOST_READ, MOST_PENDING
        return cast(Callable[[Any, RecordSlot, int], bool], native.Taker(self, self._framework, self._copies, *most))

    def record(self, tensor: Any, slot: RecordSlot, step: int) -> None:
        decided, self._decided = self._decided, None
        if self._places is not None:
            self._record_placed(self._places, tensor, slot, step, decided)
            return
        if (device_reader := self._framework.device_reader(tensor)) is None:
            self._record_here(tensor, slot, step)
        else:
            read, when = decided or self._decide(device_reader, tensor, slot, step)
            trial = read if when == "twice" and isinstance(read, ReadSlot) else None
            self._record_there(device_reader, slot, step, tensor, trial)

    def _append_copy(self, slot: RecordSlot, copied: CopiedTensor, step: int) -> None:
        if slot.used == step:
            slot = self.slots.claim(slot, step)
        else:
            slot.used = step
        rows = self._host_rows
        if rows is None or rows.step != step or len(rows.entries) == MOST_PENDING:
            rows = self._new_host_rows(step)
        rows.entries.append(slot, copied, self._seq)
        self._seq += 1

    def record_step_gradient(self, tensor: Any, slot: RecordSlot, step: int) -> None:
        """Record a gradient as the optimizer sees it, unless it is equal to the parameter's only param_grad.

        A tensor that was seen before is recognised without reading it. Others are read, and dropped if their elements
        or their digest are those of the param_grad.
        """
        gradients = self._gradients.pop((slot.module, slot.path), [])
        only = gradients[0] if len(gradients) == 1 else None
        placement = None if self._places is None else self._places.place(tensor, slot, step)
        if (device_reader := self._reader_of(tensor, placement)) is None:
            self._record_gradient_here(tensor, slot, step, only, placement)
        else:
            row = only[1] if isinstance(only, tuple) and only[0] is self._pending else None
            self._record_there(device_reader, slot, step, tensor, repeats=row, placement=placement)

    def _reader_of(self, tensor: Any, placement: Placement | None) -> DeviceReader | None:
        """Return the reader of a tensor's device; None if the tensor must be read on the host."""
        device_reader = self._framework.device_reader(tensor)
        if device_reader is None or placement is None or device_reader.can_place(tensor, placement):
            return device_reader
        return None

    def _record_gradient_here(
        self, tensor: Any, slot: RecordSlot, step: int, gradient: Any, placement: Placement | None = None
    ) -> None:
        quick = slot.keep == "summary" and self._copies_small and self.placer is None
        memory = self._framework.host_memory(tensor) if quick else None
        if memory is not None and memory[0].elements <= MOST_READ:
            if not isinstance(gradient, CopiedTensor):
                self._append_copy(slot, self._copies.take(tensor, memory, False), step)
            elif (changed := take_changed(self._copies, tensor, memory, gradient)) is not None:
                self._append_copy(slot, changed, step)
            return
        array = self._framework.host(tensor)
        if isinstance(gradient, SeenTensor) and gradient.placement == placement:
            identity = self._framework.identity(tensor)
            same = identity is not None and gradient.identity == identity and gradient.alive()
            if same and gradient.probe == probe(array):
                return
        else:
            gradient = None
        summary = summarize(array, placement=placement)
        if (
            gradient is None
            or summary.digest != gradient.summary.digest
            or summary.elements != gradient.summary.elements
        ):
            seen = SeenTensor(None, b"", next(self._numbers), summary, placement=placement)
            self._write_record(array, seen, slot, step)

    def end_step(self) -> None:
        """Finish the step, and drop what is known of its tensors: those that outlive it may change unseen."""
        self.flush_reads()
        self._gradients.clear()
        self.send()

    def _end_host_step(self) -> None:
        self._known.clear()
        self._copies.forget()
        self._send_host_rows()

    def _record_placed(
        self,
        places: SlotPlacer,
        tensor: Any,
        slot: RecordSlot,
        step: int,
        decided: Decision | None,
    ) -> None:
        """Record a tensor of a run of several processes, whose position in the whole is found now."""
        device_reader = self._framework.device_reader(tensor)
        place = None if device_reader is None else places.place_there(device_reader, tensor, slot, step)
        if place is None:
            placement = places.place(tensor, slot, step)
            slot = places.slot_in_whole(slot, step)
        else:
            placement = place.placement
        if (device_reader := self._reader_of(tensor, placement)) is None:
            self._record_here(tensor, slot, step, placement)
            return
        read, when = NOW
        if place is not None and place.base is not None:
            read, when = decided or self._decide(device_reader, tensor, slot, step, place)
        trial = read if when == "twice" and isinstance(read, ReadSlot) else None
        self._record_there(device_reader, slot, step, tensor, trial, placement=placement, place=place)

    def _send_host_rows(self) -> None:
        self._copies.finish_batch()
        rows, self._host_rows = self._host_rows, None
        if rows is not None:
            rows.show_alarm()
            self._writer.append_rows(rows)

    def _new_host_rows(self, step: int) -> HostRows:
        self._send_host_rows()
        self._host_rows = HostRows(step, new_entries(self._copies), self._repeated, self.alarm)
        return self._host_rows

    def _record_here(self, tensor: Any, slot: RecordSlot, step: int, placement: Placement | None = None) -> None:
        # Parameters and buffers are read every time, as in `_copy`.
        identity = None if slot.phase == "state" else self._framework.identity(tensor)
        array = self._framework.host(tensor)
        seen = probe(array) if identity is not None else b""
        known = self._known.find(identity)
        if known is None or known.probe != seen or known.placement != placement:
            summary = summarize(array, placement=placement)
            known = SeenTensor(identity, seen, next(self._numbers), summary, placement=placement)
            self._known.add(known)
        if slot.kind == "param_grad":
            self._note_gradient(slot, known)
        self._write_record(array, known, slot, step)

    def _write_record(self, array: Any, known: SeenTensor, slot: RecordSlot, step: int) -> None:
        keep = slot.keep
        if keep != "summary" and must_put(known.location, keep):
            known.location = self._writer.put(name_in_file(slot), array, step=step, ring=keep == "ring")
        key = self.slots.claim(slot, step).key(step)
        self._writer.append(
            Record(
                key=key,
                rank=self._rank,
                seq=self._seq,
                cls=slot.site.cls,
                dtype=dtypes.name_of(array.dtype),
                shape=array.shape,
                tensor=known.number,
                summary=known.summary,
                location=known.location if keep != "summary" else None,
                placement=known.placement,
            )
        )
        if self.alarm is not None:
            self.alarm.saw(key, self._seq, slot.site.cls, array.dtype.name, known.summary)
        self._seq += 1

    def forget(self, tensor: Any) -> None:
        """Treat a tensor as a new one: its memory was reused, and no version counts that."""
        if (device_reader := self._framework.device_reader(tensor)) is not None:
            token = device_reader.describe(tensor)[0]
            if token is not None and self._pending is not None:
                for each in (token, *(() if self._places is None else self._places.tokens(token))):
                    self._pending.entries.forget(each)
        else:
            if (memory := self._framework.host_memory(tensor)) is not None:
                self._copies.forget_one(memory)
            if (identity := self._framework.identity(tensor)) is not None:
                self._known.forget(identity)
