"""Flattens arguments and outputs of a module, however nested, into tensors with a path each, and plain values.

This does not use a framework's own function: neither torch's nor paddle's opens plain dataclasses. A path is part of a
record's identity, so it must not depend on the framework.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from tensortap.core.interrupts import raise_interrupt

__all__ = ["Opened", "is_opened", "open_arguments", "open_value", "parts_within"]

_DEEPEST = 32
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, range, slice)


@dataclasses.dataclass(slots=True)
class Opened:
    """Tensors by path, in order; types that could not be opened; and all other values."""

    tensors: list[tuple[str, Any]]
    closed: list[str]
    plain: Sequence[tuple[str, Any]] = ()
    """Plain values by path. A container without tensors is one value."""
    template: Any = None
    """The `templates.Template` that the value follows; None if it was opened without one."""
    arguments: Mapping[str, Any] | None = None
    """The plain values in the form of `core.arguments.written`, where that is known already."""
    detached: Sequence[str] | None = None
    """Paths of all tensors that autograd does not reach, where the tensors themselves do not show it."""
    paths: Sequence[str] = ()
    """With `detached`: the paths of all tensors, also of those that `tensors` lacks."""
    in_graph: Sequence[bool] = ()
    """With `detached`: whether compiled code has made each tensor, in memory of its own."""


def open_value(value: Any, is_tensor: Callable[[Any], bool]) -> Opened:
    """Flatten an output. A bare tensor has the path "0", like the only element of a tuple."""
    if is_tensor(value):  # by far the most common case
        return Opened([("0", value)], [])
    opener = _Opener(is_tensor)
    opener.open(value, "", 0)
    return opener.opened()


def open_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any], is_tensor: Callable[[Any], bool]) -> Opened:
    """Flatten the arguments of a call. Positions and keyword names are the first part of a path."""
    if len(args) == 1 and not kwargs and is_tensor(args[0]):
        return Opened([("0", args[0])], [])
    opener = _Opener(is_tensor)
    opener.open(args, "", 0)
    opener.open(kwargs, "", 0)
    return opener.opened()


class _Opener:
    def __init__(self, is_tensor: Callable[[Any], bool]) -> None:
        self._is_tensor = is_tensor
        self._tensors: list[tuple[str, Any]] = []
        self._closed: list[str] = []
        self._plain: list[tuple[str, Any]] = []
        self._used: set[str] = set()
        self._open: set[int] = set()

    def opened(self) -> Opened:
        return Opened(self._tensors, self._closed, self._plain)

    def open(self, value: Any, path: str, depth: int) -> None:
        try:
            self._open_parts(value, path, depth)
        except Exception as error:  # the value's own code runs here: properties, `items()`, `__class__`
            raise_interrupt(error)
            self._open.discard(id(value))
            self._closed.append(f"{type(value).__qualname__} (reading it raised {type(error).__name__})")

    def _open_parts(self, value: Any, path: str, depth: int) -> None:
        if self._is_tensor(value):
            self._tensors.append((self._unique(path or "0"), value))
            return
        if (parts := parts_within(value, depth, self._open)) is None:
            if isinstance(value, _Unreadable):
                self._closed.append(str(value))
            elif not isinstance(value, _PLAIN):
                itself = "" if _keyed_parts(value) is None else " (nested in itself)"
                self._closed.append(f"{type(value).__qualname__}{itself}")
            self._plain.append((path, value))
            return
        tensors, plain = len(self._tensors), len(self._plain)
        self._open.add(id(value))
        mapping = isinstance(value, Mapping)
        for key, part in parts:
            name = str(key).replace(".", "\\.") if mapping else str(key)
            self.open(part, f"{path}.{name}" if path else name, depth + 1)
        self._open.discard(id(value))
        if path and len(self._tensors) == tensors:
            self._plain[plain:] = [(path, value)]

    def _unique(self, path: str) -> str:
        """Return the path, with a ~2 for a second key that has the same text, like 1 and "1"."""
        candidate, number = path, 1
        while candidate in self._used:
            number += 1
            candidate = f"{path}~{number}"
        self._used.add(candidate)
        return candidate


def parts_within(value: Any, depth: int, around: Collection[int]) -> Iterator[tuple[Any, Any]] | None:
    """Return the parts of a container, each with its key, index or name.

    Return None if it cannot be opened, because it has no parts or is nested in itself. `around` holds the ids of the
    containers around it.
    """
    if isinstance(value, _PLAIN) or depth >= _DEEPEST or id(value) in around:
        return None
    return _keyed_parts(value)


def is_opened(value: Any) -> bool:
    """Return whether the value has parts. All values of one type have, or none."""
    return not isinstance(value, _PLAIN) and _keyed_parts(value) is not None


def _keyed_parts(value: Any) -> Iterator[tuple[Any, Any]] | None:
    if type(value) in (tuple, list):  # by far the most common, and the checks below take longer than opening
        return iter(enumerate(value))
    if isinstance(value, Mapping):  # before dataclass: a ModelOutput is both, and its mapping omits None
        return iter(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (list, tuple)):
        return iter(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((field.name, _attribute(value, field.name)) for field in dataclasses.fields(value))
    return None


class _Unreadable(str):
    """Stand-in for an attribute that raises when it is read; its text says so."""

    __slots__ = ()


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception as error:
        raise_interrupt(error)
        return _Unreadable(f"{type(value).__qualname__}.{name} (reading it raised {type(error).__name__})")
