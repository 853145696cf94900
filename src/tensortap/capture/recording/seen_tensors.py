"""Tensors in host memory that a step has shown, so that each is read and stored once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensortap.core.placement import Placement
from tensortap.core.records import Location, Summary
from tensortap.frameworks.base import Identity

__all__ = ["SeenTensor", "SeenTensors"]

_MOST = 100_000


@dataclass(slots=True, eq=False)
class SeenTensor:
    """A tensor that was read."""

    identity: Identity | None
    probe: bytes
    number: int
    summary: Summary
    location: Location | None = None
    placement: Placement | None = None

    def alive(self) -> bool:
        return self.identity is not None and self.identity.alive()


class SeenTensors:
    """The tensors of a step, by the token of their identity."""

    __slots__ = ("_most", "_seen")

    def __init__(self) -> None:
        self._seen: dict[Any, SeenTensor] = {}
        self._most = _MOST

    def find(self, identity: Identity | None) -> SeenTensor | None:
        """Return the tensor with this identity; None if none was seen, or its memory may be another tensor's now."""
        known = self._seen.get(identity.token) if identity is not None else None
        return known if known is not None and known.alive() else None

    def add(self, seen: SeenTensor) -> None:
        if seen.identity is None:
            return
        self._seen[seen.identity.token] = seen
        if len(self._seen) > self._most:  # bounds memory in a step that never ends
            self._seen = {token: seen for token, seen in self._seen.items() if seen.alive()}
            self._most = max(_MOST, 2 * len(self._seen))

    def forget(self, identity: Identity) -> None:
        self._seen.pop(identity.token, None)

    def clear(self) -> None:
        self._seen.clear()
        self._most = _MOST
