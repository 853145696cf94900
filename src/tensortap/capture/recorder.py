"""Turns tensors into records: each tensor is read, summarised and stored once, however often it is seen.

Tensors in host memory are summarised at once. Tensors on a device are read there, and their summaries arrive later.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from tensortap.capture.alarm import Alarm
from tensortap.capture.deferred.pending import PendingRows
from tensortap.capture.deferred.read_order import ReadOrder, ReadSlot
from tensortap.capture.placer import Placer
from tensortap.capture.selection import Keep
from tensortap.capture.tree import Site
from tensortap.capture.unique_keys import UniqueKeys
from tensortap.core import dtypes
from tensortap.core.placement import Placement
from tensortap.core.records import Key, Location, Record, Summary
from tensortap.frameworks.base import Framework, Identity
from tensortap.frameworks.device_reader import DeviceReader
from tensortap.kernels import summarize
from tensortap.kernels.summary.probe import probe
from tensortap.store.format import RING_PREFIX
from tensortap.store.writer.rank_writer import RankWriter

__all__ = ["Recorder"]

_MOST_KNOWN = 100_000
_MOST_PENDING = 4096
_NOW: tuple[ReadSlot | None, str] = (None, "now")


@dataclass(slots=True, eq=False)
class _SeenTensor:
    """A tensor in host memory that was seen before in this step."""

    identity: Identity | None
    probe: bytes
    number: int
    summary: Summary
    location: Location | None = None
    placement: Placement | None = None

    def alive(self) -> bool:
        return self.identity is not None and self.identity.alive()


class _Trial:
    """A second read of a row, which shows whether the first could have been deferred."""

    __slots__ = ("_pending", "_row", "_slot")

    def __init__(self, slot: ReadSlot, pending: PendingRows, row: int) -> None:
        self._slot = slot
        self._pending = pending
        self._row = row

    @property
    def safe_delay(self) -> int:
        return self._slot.safe_delay

    def report_second_read(self, others: int, ticket: Any) -> None:
        self._slot.report_delay(others, changed=ticket is None)
        if ticket is not None:
            self._pending.add_second_read(self._row, self._slot, ticket)


class Recorder:
    """Writes records of tensors into a run."""

    def __init__(
        self,
        framework: Framework,
        writer: RankWriter,
        rank: int,
        lock: AbstractContextManager[Any],
        gather: bool = True,
    ) -> None:
        self._framework = framework
        self._writer = writer
        self._rank = rank
        self._known: dict[Any, _SeenTensor] = {}
        self._gradients: dict[tuple[str, str], list[Any]] = {}
        """The param_grad of each parameter since its optimizer's last step: one entry, or two if there were more."""
        self._keys = UniqueKeys()
        self._most_known = _MOST_KNOWN
        self._pending: PendingRows | None = None
        self._device_readers: list[DeviceReader] = []
        self._lock = lock
        """Held while anything is recorded."""
        self._gather = gather
        self._decided: tuple[ReadSlot | None, str] | None = None
        """The decision of `defer` on the current tensor."""
        self.read_order = ReadOrder()
        self._seq = 0
        self._numbers = count()
        self.placer: Placer | None = None
        """Finds where in a whole each tensor sits; None in a run of one process."""
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

    def defer(self, tensor: Any, key: Key, site: Site, keep: Keep) -> bool:
        """Return whether the tensor is recorded later, in one launch with others. Otherwise the caller records it now.

        This runs first for every tensor between the calls of a model. For most tensors on a device it is all that runs.
        """
        self._decided = None
        if self.placer is not None:  # its position must be known while the tensor is at hand
            return False
        if not self._device_readers:  # none is made here: a CUDA graph may be being captured
            return False
        if (device_reader := self._framework.device_reader(tensor)) is None:
            return False
        slot, when = self._decided = self._decide(tensor, key, keep)
        if slot is None or when != "later":
            return False
        return device_reader.defer(tensor, slot, partial(self._read_deferred, device_reader, key, site, keep, slot))

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        decided, self._decided = self._decided, None
        if self.placer is not None:
            self._record_placed(tensor, key, site, keep)
            return
        for device in self._device_readers:
            device.run_deferred()  # records have an order
        if (device_reader := self._framework.device_reader(tensor)) is None:
            self._record_here(tensor, key, site, keep)
        else:
            slot, when = decided or self._decide(tensor, key, keep)
            self._record_there(device_reader, key, site, keep, tensor, slot if when == "twice" else None)

    def record_step_gradient(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        """Record a gradient as the optimizer sees it, unless it is equal to the parameter's only param_grad.

        A tensor that was seen before is recognised without reading it. Others are read, and dropped if their digest is
        that of the param_grad.
        """
        for device in self._device_readers:
            device.run_deferred()
        placement = self._place(tensor, key, site)
        gradients = self._gradients.pop((key.module, key.path), [])
        only = gradients[0] if len(gradients) == 1 else None
        if placement is not None or (device_reader := self._framework.device_reader(tensor)) is None:
            before = only if isinstance(only, _SeenTensor) else None
            self._record_gradient_here(tensor, key, site, keep, before, placement)
        else:
            row = only[1] if isinstance(only, tuple) and only[0] is self._pending else None
            self._record_there(device_reader, key, site, keep, tensor, repeats=row)

    def _record_gradient_here(
        self,
        tensor: Any,
        key: Key,
        site: Site,
        keep: Keep,
        gradient: _SeenTensor | None,
        placement: Placement | None = None,
    ) -> None:
        array = self._framework.host(tensor)
        if gradient is not None and gradient.placement == placement:
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
            seen = _SeenTensor(None, b"", next(self._numbers), summary, placement=placement)
            self._write_record(array, seen, key, site, keep)

    def _note_gradient(self, key: Key, seen: Any) -> None:
        """Take note of a param_grad, to recognise it in the optimizer's step."""
        gradients = self._gradients.setdefault((key.module, key.path.partition("~")[0]), [])
        if len(gradients) < 2:
            gradients.append(seen)

    def _read_deferred(
        self, device_reader: DeviceReader, key: Key, site: Site, keep: Keep, slot: ReadSlot, tensor: Any
    ) -> None:
        """Record a deferred tensor; None if it has changed since."""
        if tensor is None:
            self._keys.unique(key)  # it uses up its key all the same
            slot.report_changed()
        else:
            self._record_there(device_reader, key, site, keep, tensor)

    def _decide(self, tensor: Any, key: Key, keep: Keep) -> tuple[ReadSlot | None, str]:
        """Return when to read a tensor on a device; see `ReadOrder.when`."""
        # A tensor without gradient may belong to other code, as an input from another stream, and change unseen.
        # Parameters and buffers are read when nothing runs.
        own = (phase := key.phase) == "backward" or (phase == "forward" and self._framework.requires_gradient(tensor))
        return self.read_order.when(key) if own and keep == "summary" and self._gather else _NOW

    def end_step(self) -> None:
        """Finish the step, and drop what is known of its tensors: those that outlive it may change unseen."""
        self.flush_reads()
        self._keys.clear()
        self._gradients.clear()
        self._most_known = _MOST_KNOWN
        self.send()

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
        if self._pending is not None:
            self._pending.seal()  # results on a device may be overwritten now
            if len(self._pending):  # there is none if the first tensor failed
                self._writer.append_rows(self._pending)
            self._pending = None

    def close(self) -> None:
        """Release the devices."""
        for device_reader in self._device_readers:
            device_reader.close()

    def _record_placed(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        """Record a tensor of a run of several processes, whose position in the whole is found now."""
        for device in self._device_readers:
            device.run_deferred()
        placement = self._place(tensor, key, site)
        assert self.placer is not None
        key = self.placer.key_in_whole(key)
        if placement is None and (device_reader := self._framework.device_reader(tensor)) is not None:
            self._record_there(device_reader, key, site, keep, tensor)
        else:
            self._record_here(tensor, key, site, keep, placement)

    def _place(self, tensor: Any, key: Key, site: Site) -> Placement | None:
        if self.placer is None:
            return None
        return self.placer.place(tensor, self._framework.local_shape(tensor), key, site)

    def _record_here(self, tensor: Any, key: Key, site: Site, keep: Keep, placement: Placement | None = None) -> None:
        # Parameters and buffers are read every time: fused optimizers, for example, do not count versions.
        identity = None if key.phase == "state" else self._framework.identity(tensor)
        array = self._framework.host(tensor)
        seen = probe(array) if identity is not None else b""
        known = self._seen_before(identity)
        if known is None or known.probe != seen or known.placement != placement:
            summary = summarize(array, placement=placement)
            known = _SeenTensor(identity, seen, next(self._numbers), summary, placement=placement)
            self._remember(known)
        if key.kind == "param_grad":
            self._note_gradient(key, known)
        self._write_record(array, known, key, site, keep)

    def _write_record(self, array: Any, known: _SeenTensor, key: Key, site: Site, keep: Keep) -> None:
        if keep != "summary" and _must_put(known.location, keep):
            known.location = self._writer.put(_name_in_file(key), array, step=key.step, ring=keep == "ring")
        self._writer.append(
            Record(
                key=Key(*self._keys.unique(key)),
                rank=self._rank,
                seq=self._seq,
                cls=site.cls,
                dtype=dtypes.name_of(array.dtype),
                shape=array.shape,
                tensor=known.number,
                summary=known.summary,
                location=known.location if keep != "summary" else None,
                placement=known.placement,
            )
        )
        if self.alarm is not None:
            self.alarm.saw(key, self._seq, site.cls, array.dtype.name, known.summary)
        self._seq += 1

    def _record_there(
        self,
        device_reader: DeviceReader,
        key: Key,
        site: Site,
        keep: Keep,
        tensor: Any,
        trial: ReadSlot | None = None,
        repeats: int | None = None,
    ) -> None:
        """Record a tensor on its device. `trial` is the slot of one that is also read again later.

        `repeats` is the row of a tensor of which this one may be a copy: it is then dropped.
        """
        # This runs on the thread that launches the step, which must stay ahead of its device: keep calls few.
        pending = self._pending
        if pending is None or pending.device_reader is not device_reader or len(pending.tickets) == _MOST_PENDING:
            pending = self._new_pending(device_reader)
        token, dtype, shape, flat = device_reader.describe(tensor)
        if key.phase == "state" and repeats is None:  # read every time, as in `_record_here`
            token = None
        before = pending.known.get(token)
        if keep != "summary" and before is not None and _must_put(pending.location(before), keep):
            device_reader.flush()  # its bytes are kept now, so its deferred read must not be missed
        ticket = device_reader.submit(tensor, None if before is None else pending.tickets[before], flat)
        if trial is not None and token is not None:
            device_reader.submit_trial(tensor, _Trial(trial, pending, len(pending)))
        location, newly = None, False
        if keep != "summary":
            location = pending.location(before)
            if newly := _must_put(location, keep):
                parts = device_reader.parts(tensor)
                location = self._writer.put_incoming(
                    _name_in_file(key), dtype, shape, parts, step=key.step, ring=keep == "ring"
                )
        pending.append((*self._keys.unique(key), self._seq, site.cls, dtype), shape, ticket, before)
        if location is not None:
            pending.keep(location, borrowed=not newly)
        if repeats is not None:
            pending.drop_if_equal(repeats)
        elif key.kind == "param_grad":
            self._note_gradient(key, (pending, len(pending) - 1))
        if token is not None and (before is None or newly):
            pending.remember(tensor, token)
        self._seq += 1

    def _new_pending(self, device_reader: DeviceReader) -> PendingRows:
        """Return new rows for this device, after sending those of another one."""
        if device_reader not in self._device_readers:
            self._device_readers.append(device_reader)
            device_reader.lock = self._lock
        if self._pending is not None:
            self.send()
        self._pending = PendingRows(device_reader, self._numbers, self.changed_unseen, self.alarm)
        return self._pending

    def _seen_before(self, identity: Identity | None) -> _SeenTensor | None:
        known = self._known.get(identity.token) if identity is not None else None
        return known if known is not None and known.alive() else None

    def _remember(self, known: _SeenTensor) -> None:
        if known.identity is None:
            return
        self._known[known.identity.token] = known
        if len(self._known) > self._most_known:
            self._known = {token: known for token, known in self._known.items() if known.alive()}
            self._most_known = max(_MOST_KNOWN, 2 * len(self._known))


def _must_put(location: Location | None, keep: Keep) -> bool:
    """Return whether a tensor that may be stored already must be stored: a ring's copy does not last."""
    return location is None or (keep == "tensors" and location.file.startswith(RING_PREFIX))


def _name_in_file(key: Key) -> str:
    """Return the tensor's name in its safetensors file, for readers other than tensortap."""
    mode = "eval" if key.phase == "eval" else "micro"
    return f"{key.module or '(root)'}/{key.kind}/{key.path}/{mode}_{key.micro}/call_{key.call}"
