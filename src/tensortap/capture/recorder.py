"""From a tensor to a record: looked at once, summarised once, stored once, however often it is met.

Tensors in host memory are summarised on the spot. Those on a device are looked at there: what is found arrives later,
and records wait for it in the order in which they came.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap import dtypes
from tensortap.capture.selection import Keep
from tensortap.capture.tree import Site
from tensortap.frameworks.base import Framework, Identity, Ticket, Workshop
from tensortap.kernels import summarize
from tensortap.records import Key, Location, Record, Summary
from tensortap.store.writer import RunWriter

__all__ = ["Recorder"]

_PROBES = 32
_MOST_KNOWN = 100_000
_MANY_WAITING = 2048
_MOST_WAITING = 16_384


@dataclass(slots=True, eq=False)
class _Sighting:
    """A tensor as it was met."""

    identity: Identity | None
    dtype: str
    shape: tuple[int, ...]
    probe: bytes = b""
    summary: Summary | None = None
    location: Location | None = None
    ticket: Ticket | None = None
    """On a device: stands for the summary until it has arrived."""
    before: _Sighting | None = None
    """On a device: an earlier sighting of what should be the same tensor."""
    borrowed: bool = False
    """Whether the location is that of the sighting before."""
    number: int | None = None

    def alive(self) -> bool:
        return self.identity is not None and self.identity.alive()


@dataclass(slots=True, eq=False)
class _Waiting:
    key: Key
    cls: str
    seen: _Sighting
    kept: bool


class Recorder:
    """Writes records of tensors into a run."""

    def __init__(self, framework: Framework, writer: RunWriter, rank: int) -> None:
        self._framework = framework
        self._writer = writer
        self._rank = rank
        self._known: dict[Any, _Sighting] = {}
        self._keys: set[Key] = set()
        self._most_keys = self._most_known = _MOST_KNOWN
        self._waiting: deque[_Waiting] = deque()
        self._workshops: list[Workshop] = []
        self._seq = 0
        self._tensors = 0
        self.changed_unseen: set[str] = set()
        """Modules with a tensor that was changed behind the framework's back, so that its bytes were not kept again."""

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        # Parameters and buffers are looked at anew each time: fused optimizers, for one, count no version.
        identity = None if key.phase == "state" else self._framework.identity(tensor)
        workshop = self._framework.workshop(tensor)
        if workshop is None:
            seen = self._look_here(tensor, identity, key, keep)
        else:
            seen = self._look_there(workshop, tensor, identity, key, keep)
        self._waiting.append(_Waiting(self._unique(key), site.cls, seen, keep == "tensors"))
        if workshop is None or len(self._waiting) % _MANY_WAITING == 0:
            self._settle(_MOST_WAITING)

    def end_step(self) -> None:
        """Forget the step. What outlives it may change unseen."""
        self._keys.clear()
        self._known.clear()
        self._most_keys = self._most_known = _MOST_KNOWN
        for workshop in self._workshops:
            workshop.end_step()
        self._settle(_MOST_WAITING)

    def settle(self) -> None:
        """Wait for all that is under way, and hand it on."""
        for workshop in self._workshops:
            workshop.end_step()
        self._known.clear()  # its results on the device may be written over now
        self._settle(0)

    def close(self) -> None:
        """Let go of the devices."""
        for workshop in self._workshops:
            workshop.close()

    def _look_here(self, tensor: Any, identity: Identity | None, key: Key, keep: Keep) -> _Sighting:
        array = self._framework.host(tensor)
        probe = _probe(array) if identity is not None else b""
        seen = self._seen_before(identity)
        if seen is None or seen.probe != probe:
            seen = _Sighting(identity, dtypes.name_of(array.dtype), array.shape, probe, summarize(array))
            self._remember(seen)
        if keep == "tensors" and seen.location is None:
            seen.location = self._writer.put(_name_in_file(key), array, step=key.step)
        return seen

    def _look_there(
        self, workshop: Workshop, tensor: Any, identity: Identity | None, key: Key, keep: Keep
    ) -> _Sighting:
        if workshop not in self._workshops:
            self._workshops.append(workshop)
        before = self._seen_before(identity)
        dtype, shape, parts = workshop.send(tensor)
        seen = _Sighting(identity, dtype, shape, before=before)
        seen.ticket = workshop.submit(tensor, before.ticket if before is not None else None)
        if keep == "tensors":
            if before is not None and before.location is not None:
                seen.location, seen.borrowed = before.location, True
            else:
                seen.location = self._writer.put_incoming(_name_in_file(key), dtype, shape, parts, step=key.step)
        if before is None or (seen.location is not None and not seen.borrowed):
            self._remember(seen)
        return seen

    def _seen_before(self, identity: Identity | None) -> _Sighting | None:
        seen = self._known.get(identity.token) if identity is not None else None
        return seen if seen is not None and seen.alive() else None

    def _remember(self, seen: _Sighting) -> None:
        if seen.identity is None:
            return
        self._known[seen.identity.token] = seen
        if len(self._known) > self._most_known:
            self._known = {token: known for token, known in self._known.items() if known.alive()}
            self._most_known = max(_MOST_KNOWN, 2 * len(self._known))

    def _settle(self, most: int) -> None:
        """Hand on what has arrived, in order; wait while more than `most` records wait."""
        while self._waiting:
            ticket = self._waiting[0].seen.ticket
            if ticket is not None and len(self._waiting) <= most and not ticket.ready():
                return
            self._hand_on(self._waiting.popleft())

    def _hand_on(self, waiting: _Waiting) -> None:
        seen = waiting.seen
        location = seen.location if waiting.kept else None
        if seen.ticket is not None and seen.summary is None:
            seen.summary = seen.ticket.summary()
            if seen.before is not None:
                if seen.ticket.unchanged():
                    seen.number = seen.before.number
                elif location is not None and seen.borrowed:
                    self.changed_unseen.add(waiting.key.module)
                    location = None
        assert seen.summary is not None
        if seen.number is None:
            seen.number = self._tensors
            self._tensors += 1
        self._writer.append(
            Record(
                key=waiting.key,
                rank=self._rank,
                seq=self._seq,
                cls=waiting.cls,
                dtype=seen.dtype,
                shape=seen.shape,
                tensor=seen.number,
                summary=seen.summary,
                location=location,
            )
        )
        self._seq += 1

    def _unique(self, key: Key) -> Key:
        """A second backward through the same graph meets the same key again: its path gets a ~2."""
        path, number = key.path, 1
        while key in self._keys:
            number += 1
            key = key._replace(path=f"{path}~{number}")
        self._keys.add(key)
        if len(self._keys) > self._most_keys:  # a loop that never ends its step must not be remembered for ever
            self._keys = {known for known in self._keys if known.micro >= key.micro - 1}
            self._most_keys = max(_MOST_KNOWN, 2 * len(self._keys))
        return key


def _probe(array: npt.NDArray[np.generic]) -> bytes:
    """A few elements, spread out. Frameworks count most changes in place but not those made behind autograd's back
    (`x.data.mul_(2)`); an unchanged count with changed elements must not pass for the same tensor."""
    if array.size <= _PROBES:
        return array.tobytes()
    if not array.flags.c_contiguous:
        return bytes(array.flat[:: array.size // _PROBES].tobytes())
    return array.reshape(-1)[:: array.size // _PROBES].tobytes()


def _name_in_file(key: Key) -> str:
    """How the tensor is called in its safetensors file, for people who open it without tensortap."""
    return f"{key.module or '(root)'}/{key.kind}/{key.path}/micro_{key.micro}/call_{key.call}"
