"""From a tensor to a record: looked at once, summarised once, stored once, however often it is met.

Tensors in host memory are summarised on the spot. Those on a device are looked at there; what is found arrives later.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from tensortap.capture.deferred.pending import PendingRows
from tensortap.capture.deferred.read_order import Place, ReadOrder
from tensortap.capture.selection import Keep
from tensortap.capture.tree import Site
from tensortap.capture.unique_keys import Keys
from tensortap.core import dtypes
from tensortap.core.records import Key, Location, Record, Summary
from tensortap.frameworks.base import DeviceReader, Framework, Identity
from tensortap.kernels import summarize
from tensortap.kernels.summary.probe import probe
from tensortap.store.writer.rank_writer import RankWriter

__all__ = ["Recorder"]

_MOST_KNOWN = 100_000
_MANY = 4096
_AT_ONCE: tuple[Place | None, str] = (None, "now")


@dataclass(slots=True, eq=False)
class _Known:
    """A tensor in host memory that was met before in this step."""

    identity: Identity | None
    probe: bytes
    number: int
    summary: Summary
    location: Location | None = None

    def alive(self) -> bool:
        return self.identity is not None and self.identity.alive()


class _Trial:
    """Of a row that will be read again, to see whether it could have waited."""

    __slots__ = ("_pending", "_place", "_row")

    def __init__(self, place: Place, pending: PendingRows, row: int) -> None:
        self._place = place
        self._pending = pending
        self._row = row

    @property
    def proven(self) -> int:
        return self._place.proven

    def waited(self, others: int, ticket: Any) -> None:
        self._place.tried(others, changed=ticket is None)
        if ticket is not None:
            self._pending.read_again(self._row, self._place, ticket)


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
        self._known: dict[Any, _Known] = {}
        self._keys = Keys()
        self._most_known = _MOST_KNOWN
        self._pending: PendingRows | None = None
        self._device_readers: list[DeviceReader] = []
        self._lock = lock
        """Under which all is recorded."""
        self._gather = gather
        self._decided: tuple[Place | None, str] | None = None
        """What `put_off` has decided on the tensor that comes now."""
        self.read_order = ReadOrder()
        self._seq = 0
        self._numbers = count()
        self.changed_unseen: set[str] = set()
        """Modules with a tensor that was changed behind the framework's back, so that its bytes were not kept again."""

    @property
    def records(self) -> int:
        """Number of records so far."""
        return self._seq

    def put_off(self, tensor: Any, key: Key, site: Site, keep: Keep) -> bool:
        """Whether the tensor will be recorded a little later, in one go with others; if not, it is to be recorded now.

        Asked of every tensor between the calls of a model, and before anything else: on a device it is the only thing
        that is done for most of them then.
        """
        self._decided = None
        if not self._device_readers:  # none is made here, where a graph may be being captured
            return False
        if (device_reader := self._framework.device_reader(tensor)) is None:
            return False
        place, when = self._decided = self._decide(tensor, key, keep)
        if place is None or when != "later":
            return False
        return device_reader.put_off(tensor, place, partial(self._look, device_reader, key, site, keep, place))

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        decided, self._decided = self._decided, None
        for device in self._device_readers:
            device.catch_up()  # records have an order
        if (device_reader := self._framework.device_reader(tensor)) is None:
            self._record_here(tensor, key, site, keep)
        else:
            place, when = decided or self._decide(tensor, key, keep)
            self._record_there(device_reader, key, site, keep, tensor, place if when == "twice" else None)

    def _look(self, device_reader: DeviceReader, key: Key, site: Site, keep: Keep, place: Place, tensor: Any) -> None:
        """At one that was put off; None if it was changed since."""
        if tensor is None:
            self._keys.unique(key)  # it is the one with this key all the same
            place.lost()
        else:
            self._record_there(device_reader, key, site, keep, tensor)

    def _decide(self, tensor: Any, key: Key, keep: Keep) -> tuple[Place | None, str]:
        """How a tensor on a device is to be read; see `ReadOrder.when`."""
        # What needs no gradient may come from elsewhere, another stream's input for one, and go back there unseen.
        # Parameters and buffers are looked at when nothing runs.
        own = (phase := key.phase) == "backward" or (phase == "forward" and self._framework.requires_gradient(tensor))
        return self.read_order.when(key) if own and keep == "summary" and self._gather else _AT_ONCE

    def end_step(self) -> None:
        """Forget the step. What outlives it may change unseen."""
        self.settle()
        self._keys.clear()
        self._most_known = _MOST_KNOWN
        self.send()

    def settle(self) -> None:
        """A forward or a step is over: what was put off is read."""
        for device_reader in self._device_readers:
            device_reader.settle()

    def forget(self) -> None:
        """The recording has stopped: no tensor is held any longer."""
        for device_reader in self._device_readers:
            device_reader.forget()

    def send(self) -> None:
        """Let what the devices have found travel, and into the index when it has arrived."""
        for device_reader in self._device_readers:
            device_reader.end_step()
        self._known.clear()
        if self._pending is not None:
            self._pending.forget()  # results that lie on a device may be written over now
            if len(self._pending):  # the first tensor may have been one too many
                self._writer.append_rows(self._pending)
            self._pending = None

    def close(self) -> None:
        """Let go of the devices."""
        for device_reader in self._device_readers:
            device_reader.close()

    def _record_here(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        # Parameters and buffers are looked at anew each time: fused optimizers, for one, count no version.
        identity = None if key.phase == "state" else self._framework.identity(tensor)
        array = self._framework.host(tensor)
        seen = probe(array) if identity is not None else b""
        known = self._seen_before(identity)
        if known is None or known.probe != seen:
            known = _Known(identity, seen, next(self._numbers), summarize(array))
            self._remember(known)
        if keep == "tensors" and known.location is None:
            known.location = self._writer.put(_name_in_file(key), array, step=key.step)
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
                location=known.location if keep == "tensors" else None,
            )
        )
        self._seq += 1

    def _record_there(
        self,
        device_reader: DeviceReader,
        key: Key,
        site: Site,
        keep: Keep,
        tensor: Any,
        tried: Place | None = None,
    ) -> None:
        """`tried` is the place of one that is to be read again later."""
        # By the thread that launches the step, which must not fall behind its device: it is called as little as can be.
        pending = self._pending
        if pending is None or pending.device_reader is not device_reader or len(pending.tickets) == _MANY:
            pending = self._arrive_from(device_reader)
        token, dtype, shape, flat = device_reader.described(tensor)
        if key.phase == "state":  # looked at anew each time, as in `_record_here`
            token = None
        before = pending.known.get(token)
        if keep == "tensors" and before is not None and pending.location(before) is None:
            device_reader.settle()  # its bytes are kept now: it must not be missed for having waited since
        ticket = device_reader.submit(tensor, None if before is None else pending.tickets[before], flat)
        if tried is not None and token is not None:
            device_reader.submit_again(tensor, _Trial(tried, pending, len(pending)))
        location, newly = None, False
        if keep == "tensors":
            location = pending.location(before)
            if newly := location is None:
                parts = device_reader.parts(tensor)
                location = self._writer.put_incoming(_name_in_file(key), dtype, shape, parts, step=key.step)
        pending.append((*self._keys.unique(key), self._seq, site.cls, dtype), shape, ticket, before)
        if location is not None:
            pending.keep(location, borrowed=not newly)
        if token is not None and (before is None or newly):
            pending.remember(tensor, token)
        self._seq += 1

    def _arrive_from(self, device_reader: DeviceReader) -> PendingRows:
        """Rows that can be added to; what another device has found goes on its way."""
        if device_reader not in self._device_readers:
            self._device_readers.append(device_reader)
            device_reader.lock = self._lock
        if self._pending is not None:
            self.send()
        self._pending = PendingRows(device_reader, self._numbers, self.changed_unseen)
        return self._pending

    def _seen_before(self, identity: Identity | None) -> _Known | None:
        known = self._known.get(identity.token) if identity is not None else None
        return known if known is not None and known.alive() else None

    def _remember(self, known: _Known) -> None:
        if known.identity is None:
            return
        self._known[known.identity.token] = known
        if len(self._known) > self._most_known:
            self._known = {token: known for token, known in self._known.items() if known.alive()}
            self._most_known = max(_MOST_KNOWN, 2 * len(self._known))


def _name_in_file(key: Key) -> str:
    """How the tensor is called in its safetensors file, for people who open it without tensortap."""
    return f"{key.module or '(root)'}/{key.kind}/{key.path}/micro_{key.micro}/call_{key.call}"
