"""Which tensors of a fed model would be one and the same without the check.

Each tensor that goes into a module or comes out of it is replaced by a new one. So a value that goes through many hands
is as many tensors here, while capture has seen one, whose gradient is the sum over all its uses. Here is told which of
them belong together. Tensors are known by their identity for as long as they live, and are not kept alive for it; one
that was changed in place since is another value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tensortap.capture.tree import Site
from tensortap.core.records import Key

__all__ = ["Level", "Sameness"]

Note = TypeVar("Note")


@dataclass(frozen=True)
class Level:
    """A call that takes or returns a tensor."""

    site: Site
    keys: list[Key]
    """The tensor's own, and the further ones under which the call returns it once more."""


@dataclass(frozen=True)
class _Original:
    tensor: Any
    version: int
    number: int
    """Of the reference's tensor."""


@dataclass(frozen=True)
class _Returned:
    number: int
    """Of the reference's tensor."""
    levels: list[Level]


class Sameness:
    """What is known of a step's tensors. `version` tells how often one has been changed in place."""

    def __init__(self, version: Callable[[Any], int]) -> None:
        self._version = version
        self._originals: _Notes[_Original] = _Notes(version)
        self._returned: _Notes[_Returned] = _Notes(version)

    def stands_for(self, tensor: Any, original: Any, number: int) -> None:
        """A module's caller gets `tensor` in place of `original`, and the reference's has one tensor for both."""
        first = self.original(original, number)
        self._originals.put(tensor, _Original(first, self._version(first), number))

    def original(self, tensor: Any, number: int) -> Any:
        """The tensor that another one stands for where the reference has this one; itself, if for none."""
        found = self._originals.get(tensor)
        if found is None or found.number != number or self._version(found.tensor) != found.version:
            return tensor
        return found.tensor

    def returned(self, tensor: Any, number: int, levels: list[Level]) -> None:
        """A module's caller gets `tensor` for an output whose gradient is looked at for these levels, the innermost
        first."""
        self._returned.put(tensor, _Returned(number, levels))

    def levels(self, tensor: Any, number: int) -> list[Level] | None:
        """Those of the output that a tensor is, if it is this one of the reference, too."""
        found = self._returned.get(tensor)
        return None if found is None or found.number != number else found.levels

    def clear(self) -> None:
        self._originals.clear()
        self._returned.clear()


class _Notes(Generic[Note]):
    """A note on each of some tensors, which are compared by identity: to a framework, `==` means their elements."""

    def __init__(self, version: Callable[[Any], int]) -> None:
        self._version = version
        self._of: dict[int, tuple[weakref.ref[Any], int, Note]] = {}

    def put(self, tensor: Any, note: Note) -> None:
        at = id(tensor)

        def forget(dead: weakref.ref[Any]) -> None:
            if (found := self._of.get(at)) is not None and found[0] is dead:
                del self._of[at]

        self._of[at] = weakref.ref(tensor, forget), self._version(tensor), note

    def get(self, tensor: Any) -> Note | None:
        found = self._of.get(id(tensor))
        if found is None:
            return None
        itself, version, note = found
        return note if itself() is tensor and self._version(tensor) == version else None

    def clear(self) -> None:
        self._of.clear()
