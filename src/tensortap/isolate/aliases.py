"""Tracks which tensors of an isolated model would be one tensor without the check.

A check replaces each input and output of a module by a new tensor. A value that passes through several modules is
therefore several tensors here, while capture saw one, whose gradient is the sum over all uses. TensorAliases records
which of them belong together. It identifies tensors by object identity without keeping them alive. A tensor that was
changed in place counts as another value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tensortap.capture.modules.tree import Site
from tensortap.core.records import Key

__all__ = ["CallBoundary", "TensorAliases"]

Note = TypeVar("Note")


@dataclass(frozen=True)
class CallBoundary:
    """A call that takes or returns a tensor."""

    site: Site
    keys: list[Key]
    """The tensor's key, and further ones if the call returns it several times."""


@dataclass(frozen=True)
class _Original:
    tensor: Any
    version: int
    number: int
    """Number of the reference's tensor."""


@dataclass(frozen=True)
class _Returned:
    number: int
    """Number of the reference's tensor."""
    boundaries: list[CallBoundary]


class TensorAliases:
    """The aliases among a step's tensors. `version` returns how often a tensor was changed in place."""

    def __init__(self, version: Callable[[Any], int]) -> None:
        self._version = version
        self._originals: _TensorNotes[_Original] = _TensorNotes(version)
        self._returned: _TensorNotes[_Returned] = _TensorNotes(version)
        self._changed: _TensorNotes[bool] = _TensorNotes(version)

    def add_substitute(self, tensor: Any, original: Any, number: int) -> None:
        """Note that `tensor` replaces `original`, and that the reference has one tensor for both."""
        first = self.original(original, number)
        self._originals.put(tensor, _Original(first, self._version(first), number))

    def original(self, tensor: Any, number: int) -> Any:
        """Return the tensor that `tensor` replaces if the reference has tensor `number` for both; else `tensor`."""
        found = self._originals.get(tensor)
        if found is None or found.number != number or self._version(found.tensor) != found.version:
            return tensor
        return found.tensor

    def add_output(self, tensor: Any, number: int, boundaries: list[CallBoundary]) -> None:
        """Note that `tensor` replaces an output whose gradient is measured for these calls, innermost first."""
        self._returned.put(tensor, _Returned(number, boundaries))

    def boundaries(self, tensor: Any, number: int) -> list[CallBoundary] | None:
        """Return the calls of the output that a tensor replaces; None if the reference's tensor is another."""
        found = self._returned.get(tensor)
        return None if found is None or found.number != number else found.boundaries

    def add_changed(self, tensor: Any) -> None:
        """Note that a module has changed a tensor of its caller in place."""
        self._changed.put(tensor, True)

    def is_changed(self, tensor: Any) -> bool:
        """Whether a tensor has the value that a module gave it in place."""
        return self._changed.get(tensor) is not None

    def clear(self) -> None:
        self._originals.clear()
        self._returned.clear()
        self._changed.clear()


class _TensorNotes(Generic[Note]):
    """A note per tensor, by object identity, because `==` of tensors compares elements."""

    def __init__(self, version: Callable[[Any], int]) -> None:
        self._version = version
        self._notes: dict[int, tuple[weakref.ref[Any], int, Note]] = {}

    def put(self, tensor: Any, note: Note) -> None:
        identity = id(tensor)

        def forget(dead: weakref.ref[Any]) -> None:
            if (found := self._notes.get(identity)) is not None and found[0] is dead:
                del self._notes[identity]

        self._notes[identity] = weakref.ref(tensor, forget), self._version(tensor), note

    def get(self, tensor: Any) -> Note | None:
        found = self._notes.get(id(tensor))
        if found is None:
            return None
        reference, version, note = found
        return note if reference() is tensor and self._version(tensor) == version else None

    def clear(self) -> None:
        self._notes.clear()
