"""Copies and pickles of tapped modules, without the hooks of this library."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

from tensortap.frameworks.base import Remove
from tensortap.frameworks.hooks import MODULE_NUMBER, Detour, is_own_hook

__all__ = ["PlainCopies", "plain_copies"]

_SHALLOW = copy.copy.__code__


class PlainCopies:
    """While held, a deep copy or a pickle of a module leaves out hooks and detours of this library.

    Both read a module through its class's `__reduce_ex__`, which is replaced for as long as something holds this. A
    class with copying code of its own gets hooks that do nothing, see `CallHook`.
    """

    def __init__(self, base: type) -> None:
        self._base = base
        """The framework's base class of modules."""
        self._holders: set[object] = set()

    def hold(self) -> Remove:
        if not self._holders:
            inner: Callable[..., Any] = self._base.__reduce_ex__
            self._own = "__reduce_ex__" in vars(self._base)
            self._inner = inner

            def reduced(module: Any, protocol: Any) -> Any:
                result = inner(module, protocol)
                if sys._getframe(1).f_code is _SHALLOW:  # it shares its hooks with the original, also later ones
                    return result
                return _without_hooks(result)

            setattr(self._base, "__reduce_ex__", reduced)  # noqa: B010  # mypy forbids the assignment
        holder = object()
        self._holders.add(holder)

        def release() -> None:
            if holder in self._holders:
                self._holders.remove(holder)
                if not self._holders:
                    self._restore()

        return release

    def _restore(self) -> None:
        if self._own:
            setattr(self._base, "__reduce_ex__", self._inner)  # noqa: B010
        else:
            delattr(self._base, "__reduce_ex__")


@functools.cache
def plain_copies(base: type) -> PlainCopies:
    """Return the instance for a base class: all taps of a process share it."""
    return PlainCopies(base)


def _without_hooks(reduced: Any) -> Any:
    """Return the result of `__reduce_ex__` with a state that has no hook of this library."""
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return reduced
    state = reduced[2]
    if isinstance(state, dict):
        state = _cleaned(state)
    elif isinstance(state, tuple) and state and isinstance(state[0], dict):  # a class with __slots__
        state = _cleaned(state[0]), *state[1:]
    return *reduced[:2], state, *reduced[3:]


def _cleaned(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a module's `__dict__`; the original is still in use."""
    cleaned: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Detour):
            if value.replaces_own:
                cleaned[name] = value.innermost
        elif name != MODULE_NUMBER:
            cleaned[name] = value
    for name, value in state.items():
        if not isinstance(value, dict) or not (ours := {k for k, hook in value.items() if is_own_hook(hook)}):
            continue
        for other, entries in state.items():  # beside the hooks, a framework keeps flags under the same numbers
            if isinstance(entries, dict) and (other == name or other.startswith(f"{name}_")):
                cleaned[other] = type(entries)((key, each) for key, each in entries.items() if key not in ours)
    return cleaned
