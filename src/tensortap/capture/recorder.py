"""From a tensor to a record: looked at once, summarised once, stored once, however often it is met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap import dtypes
from tensortap.capture.keys import Keys
from tensortap.capture.selection import Keep
from tensortap.capture.tree import Site
from tensortap.frameworks.base import Framework, Identity
from tensortap.kernels import summarize
from tensortap.records import Key, Location, Record, Summary
from tensortap.store.writer import RunWriter

__all__ = ["Recorder"]

_PROBES = 32
_MOST_KNOWN = 100_000


@dataclass(slots=True, eq=False)
class _Known:
    identity: Identity | None
    probe: bytes
    number: int
    summary: Summary
    location: Location | None


class Recorder:
    """Writes records of tensors into a run."""

    def __init__(self, framework: Framework, writer: RunWriter, rank: int) -> None:
        self._framework = framework
        self._writer = writer
        self._rank = rank
        self._known: dict[Any, _Known] = {}
        self._keys = Keys()
        self._most_known = _MOST_KNOWN
        self._seq = 0
        self._tensors = 0

    def end_step(self) -> None:
        """Forget the step. What outlives it may change unseen: fused optimizers, for one, count no version."""
        self._keys.clear()
        self._known.clear()
        self._most_known = _MOST_KNOWN

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        array = self._framework.host(tensor)
        # Parameters and buffers are looked at anew each time, for the same reason.
        known = self._look(None if key.phase == "state" else self._framework.identity(tensor), array)
        if keep == "tensors" and known.location is None:
            known.location = self._writer.put(_name_in_file(key), array, step=key.step)
        key = self._keys.unique(key)
        self._writer.append(
            Record(
                key=key,
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

    def _look(self, identity: Identity | None, array: npt.NDArray[np.generic]) -> _Known:
        probe = _probe(array) if identity is not None else b""
        if identity is not None:
            known = self._known.get(identity.token)
            if known is not None and _alive(known) and known.probe == probe:
                return known
        known = _Known(identity, probe, self._tensors, summarize(array), None)
        self._tensors += 1
        if identity is not None:
            self._known[identity.token] = known
            if len(self._known) > self._most_known:
                self._known = {token: known for token, known in self._known.items() if _alive(known)}
                self._most_known = max(_MOST_KNOWN, 2 * len(self._known))
        return known


def _alive(known: _Known) -> bool:
    return known.identity is not None and known.identity.alive()


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
