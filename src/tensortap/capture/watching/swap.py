"""Replaces tensors in the arguments or outputs of a module, where `flatten` finds them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from tensortap.capture.watching.flatten import parts_within

__all__ = ["Swap", "swapped"]


class Swap(NamedTuple):
    """A tensor that was put into a list, dict or object which other code may hold, and must be restored there."""

    holder: Any
    name: Any
    old: Any
    new: Any

    def restore(self) -> None:
        """Put the old tensor back, unless other code has replaced the new one meanwhile."""
        if _get(self.holder, self.name) is self.new:
            _set(self.holder, self.name, self.old)


def swapped(value: Any, tensors: Iterator[Any], is_tensor: Callable[[Any], bool], swaps: list[Swap]) -> Any:
    """Return the value with `tensors` in the place of its own, in the order in which `flatten` finds them.

    Tuples are rebuilt. Lists, dicts and dataclasses are changed in place, because a module may return results through
    them; `swaps` receives the changes.
    """
    return _Swapper(tensors, is_tensor, swaps).swap(value, 0)


class _Swapper:
    def __init__(self, tensors: Iterator[Any], is_tensor: Callable[[Any], bool], swaps: list[Swap]) -> None:
        self._tensors = tensors
        self._is_tensor = is_tensor
        self._swaps = swaps
        self._open: set[int] = set()

    def swap(self, value: Any, depth: int) -> Any:
        if self._is_tensor(value):
            return next(self._tensors)
        if (parts := parts_within(value, depth, self._open)) is None:
            return value
        self._open.add(id(value))
        new = [(name, part, self.swap(part, depth + 1)) for name, part in list(parts)]
        self._open.discard(id(value))
        if all(part is other for _, part, other in new):
            return value
        return self._rebuilt(value, new)

    def _rebuilt(self, value: Any, parts: list[tuple[Any, Any, Any]]) -> Any:
        if isinstance(value, tuple):
            others = [other for _, _, other in parts]
            return type(value)._make(others) if hasattr(value, "_make") else type(value)(others)
        if _frozen(value):
            value = copy.copy(value)
        for name, part, other in parts:
            if part is not other:
                _set(value, name, other)
                self._swaps.append(Swap(value, name, part, other))
        return value


def _frozen(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not isinstance(value, MutableMapping)
    return bool(getattr(getattr(value, "__dataclass_params__", None), "frozen", False))


def _get(holder: Any, name: Any) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name)
    if isinstance(holder, list):
        return holder[name] if name < len(holder) else None
    return getattr(holder, name, None)


def _set(holder: Any, name: Any, value: Any) -> None:
    if isinstance(holder, (MutableMapping, list)):
        holder[name] = value
    elif not isinstance(holder, Mapping):
        object.__setattr__(holder, name, value)
