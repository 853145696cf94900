"""Turns tensors into records: each tensor is read, summarised and stored once, however often it is seen.

Small tensors in host memory are copied and summarised later, others at once. Tensors on a device are read there, and
their summaries arrive later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, cast

from tensortap.capture import native_classes
from tensortap.capture.incidents.alarm import Alarm
from tensortap.capture.placement.placer import Placer
from tensortap.capture.placement.slot_placer import SlotPlacer, placed_token
from tensortap.capture.recording.deferred.pending import PendingRows, SecondRead
from tensortap.capture.recording.deferred.read_order import ReadOrder, ReadSlot, SnapshotRead
from tensortap.capture.recording.host_rows import CopiedTensor, HostRows, new_copies, new_entries, take_changed
from tensortap.capture.recording.repeated_columns import RepeatedColumns
from tensortap.capture.recording.seen_tensors import SeenTensor, SeenTensors
from tensortap.capture.recording.slots import RecordSlot, SlotTable
from tensortap.capture.selection import Keep
from tensortap.core import dtypes, statistics
from tensortap.core.placement import Placement
from tensortap.core.records import Location, Record
from tensortap.frameworks.base import Framework
from tensortap.frameworks.device_reader import DeferralBound, DeviceReader, SlotPlacement
from tensortap.kernels import summarize
from tensortap.kernels.summary.batch import MOST_COPIED, MOST_READ
from tensortap.kernels.summary.probe import probe
from tensortap.store.format import RING_PREFIX
from tensortap.store.writer.rank_writer import RankWriter

__all__ = ["Recorder"]

_MOST_PENDING = 4096
_Decision = tuple[ReadSlot | SnapshotRead | None, str]
"""When to read a tensor, and what bounds the delay if it is not read now."""
_NOW: _Decision = (None, "now")


class Recorder:
    """Writes records of tensors into a run. `native/taker.h` reads some of its attributes."""

    __slots__ = (
        "_copies",
        "_copies_small",
        "_decided",
        "_device_columns",
        "_device_readers",
        "_framework",
        "_gather",
        "_gradients",
        "_host_rows",
        "_in_snapshot",
        "_known",
        "_lock",
        "_numbers",
        "_pending",
        "_places",
        "_rank",
        "_repeated",
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
        rank: int,
        lock: AbstractContextManager[Any],
        gather: bool = True,
        placer: Placer | None = None,
    ) -> None:
        self._framework = framework
        self.slots = SlotTable()
        self._writer = writer
        self._rank = rank
        self._known = SeenTensors()
        self._gradients: dict[tuple[str, str], list[Any]] = {}
        """The param_grad of each parameter since its optimizer's last step: one entry, or two if there were more."""
        self._pending: PendingRows | None = None
        self._device_readers: list[DeviceReader] = []
        self._lock = lock
        """Held while anything is recorded."""
        self._gather = gather
        self._in_snapshot = False
        """Whether parameters and buffers are being read, one after the other."""
        self._decided: _Decision | None = None
        """The decision of `take` on the current tensor."""
        self.read_order = ReadOrder()
        self._seq = 0
        self._numbers = count()
        self.placer = placer
        """Finds where in a whole each tensor sits; None in a run of one process."""
        self._places = None if placer is None else SlotPlacer(placer, framework, self.slots, writer)
        self._host_rows: HostRows | None = None
        self._repeated, self._device_columns = RepeatedColumns(), RepeatedColumns()
        self.compares_gradients = True
        """Whether an optimizer's gradients are recorded, and compared with those of backward."""
        self._copies_small = not statistics.added()
        """Whether small tensors may be summarised later. Statistics that were added need the tensor itself."""
        quick = self._copies_small and bool(framework.plain_tensors)
        self._copies = new_copies(framework.hold_tokens(), self._numbers, quick)
        self.alarm: Alarm | None = None
        """Looks at every summary for NaN, Inf and the loss."""
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
        """Do as `take`, in a run of several processes. Small tensors in host memory have no quick way there."""
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
        """Return `take`, or what does the same in less time."""
        native = native_classes.load()
        if native is None or not isinstance(self._copies, native.Copies):
            return self.take
        most = MOST_READ, _MOST_PENDING
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
        if rows is None or rows.step != step or len(rows.entries) == _MOST_PENDING:
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
        """Return what reads a tensor on its device; None if it must be read on the host."""
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

    def _note_gradient(self, slot: RecordSlot, seen: Any) -> None:
        """Take note of a param_grad, to recognise it in the optimizer's step."""
        if not self.compares_gradients:
            return
        gradients = self._gradients.setdefault((slot.module, slot.path.partition("~")[0]), [])
        if len(gradients) < 2:
            gradients.append(seen)

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

    def _decide(
        self,
        device_reader: DeviceReader,
        tensor: Any,
        slot: RecordSlot,
        step: int,
        place: SlotPlacement | None = None,
    ) -> _Decision:
        """Return when to read a tensor on a device; see `ReadOrder.when`."""
        phase = slot.phase
        if slot.keep != "summary" or not self._gather:
            return _NOW
        if phase == "state" and self._in_snapshot:
            return self.read_order.snapshot, "later"
        if phase != "backward" and phase != "forward":
            return _NOW
        # A tensor without gradient may belong to other code, as an input from another stream, and change unseen. It is
        # read when it is first seen in a step; from then on, it is known. Compiled code computes without autograd, so
        # its tensors need no gradient.
        if phase == "forward" and not slot.in_graph and not self._framework.requires_gradient(tensor):
            token = device_reader.describe(tensor)[0]
            if self._pending is None or self._pending.device_reader is not device_reader:
                return _NOW
            if token is None:
                return _NOW
            token = placed_token(token, None if place is None else place.number)
            if self._pending.entries.find(token) < 0:
                return _NOW
        return self.read_order.when(slot, step)

    def end_step(self) -> None:
        """Finish the step, and drop what is known of its tensors: those that outlive it may change unseen."""
        self.flush_reads()
        self._gradients.clear()
        self.send()

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

    def send(self) -> None:
        """Start to copy the devices' results to the host, and give their rows to the index."""
        for device_reader in self._device_readers:
            device_reader.end_step()
        self._known.clear()
        self._copies.forget()
        self._send_host_rows()
        if self._pending is not None:
            self._pending.seal()  # results on a device may be overwritten now
            if len(self._pending):  # there is none if the first tensor failed
                self._writer.append_rows(self._pending)
            self._pending = None

    def close(self) -> None:
        """Release the devices."""
        for device_reader in self._device_readers:
            device_reader.close()

    def _record_placed(
        self,
        places: SlotPlacer,
        tensor: Any,
        slot: RecordSlot,
        step: int,
        decided: _Decision | None,
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
        read, when = _NOW
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
        if keep != "summary" and _must_put(known.location, keep):
            known.location = self._writer.put(_name_in_file(slot), array, step=step, ring=keep == "ring")
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
        """Record a tensor on its device. `trial` is the slot of one that is also read again later.

        `repeats` is the row of a tensor of which this one may be a copy: it is then dropped.
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
        if keep != "summary" and before >= 0 and _must_put(pending.location(before), keep):
            device_reader.flush()  # its bytes are kept now, so its deferred read must not be missed
        ticket = device_reader.submit(tensor, None if before < 0 else pending.entries[before], flat, placement)
        if trial is not None and token is not None:
            device_reader.submit_trial(tensor, SecondRead(trial, pending, len(pending)), place)
        location, newly = None, False
        if keep != "summary":
            location = pending.location(before)
            if newly := _must_put(location, keep):
                parts = device_reader.parts(tensor)
                location = self._writer.put_incoming(
                    _name_in_file(slot), kind.name, kind.shape, parts, step=step, ring=keep == "ring"
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
        if pending is not None and pending.device_reader is device_reader and len(pending.entries) < _MOST_PENDING:
            return pending
        if device_reader not in self._device_readers:
            self._device_readers.append(device_reader)
            device_reader.lock = self._lock
            native = native_classes.load_for_device(device_reader, _MOST_PENDING)
            if native is not None:
                device_reader.use(native)
        if self._pending is not None:
            self.send()
        self._pending = PendingRows(device_reader, self._numbers, self._device_columns, self.changed_unseen, self.alarm)
        return self._pending

    def forget(self, tensor: Any) -> None:
        """Take a tensor for another one than before: its memory was reused, and no version counts that."""
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

    def code_changed(self) -> None:
        """Try anew which reads can be deferred: other compiled code uses memory in another way."""
        self.flush_reads()
        self.read_order.restart()


def _must_put(location: Location | None, keep: Keep) -> bool:
    """Return whether a tensor that may be stored already must be stored: a ring's copy does not last."""
    return location is None or (keep == "tensors" and location.file.startswith(RING_PREFIX))


def _name_in_file(slot: RecordSlot) -> str:
    """Return the tensor's name in its safetensors file, for readers other than tensortap."""
    mode = "eval" if slot.phase == "eval" else "micro"
    return f"{slot.module or '(root)'}/{slot.kind}/{slot.path}/{mode}_{slot.micro}/call_{slot.call}"
