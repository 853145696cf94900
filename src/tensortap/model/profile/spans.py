"""Calls of modules, and the spans that are open for them: one stack a thread, so that spans always nest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensortap.frameworks.base import Remove
from tensortap.frameworks.profiling import Profiling

__all__ = ["Call", "Spans"]


@dataclass(eq=False)
class Call:
    """One call of one module. It lives as long as the graph that it has made."""

    label: str
    """`layers.0.fc1 (Linear)`"""
    parent: Call | None
    mark: int
    anchors: list[Any]
    """Where the inputs' graph stood; let go when the call is over."""
    removes: list[Remove] = field(default_factory=list)
    ways_out: int = 0
    """Nodes that send gradient out of the call, where those are counted."""
    waiting: int = 0

    def chain(self) -> list[Call]:
        """From the outermost enclosing call to this one."""
        found: list[Call] = []
        call: Call | None = self
        while call is not None:
            found.append(call)
            call = call.parent
        return found[::-1]


class _Open(NamedTuple):
    call: Call
    backward: bool
    token: object
    """Spans that were opened together are closed together."""
    handle: Any


class Spans:
    """What is open on this thread. Closing a span first closes all that was opened after it."""

    def __init__(self, profiling: Profiling) -> None:
        self._profiling = profiling
        self._local = threading.local()

    def _stack(self) -> list[_Open]:
        stack: list[_Open] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def top(self) -> Call | None:
        """The call that whatever happens now on this thread is a part of."""
        stack = self._stack()
        return stack[-1].call if stack else None

    def open(self, call: Call, name: str | None, token: object, *, backward: bool = False, light: bool = False) -> None:
        """Open a span of this name; None keeps the place and shows nothing."""
        handle = None if name is None else self._profiling.begin(name, light)
        self._stack().append(_Open(call, backward, token, handle))

    def in_forward(self) -> bool:
        """Whether a module is running on this thread."""
        return any(not entry.backward for entry in self._stack())

    def in_backward(self, call: Call) -> bool:
        return any(entry.backward and entry.call is call for entry in self._stack())

    def close(self, token: object) -> bool:
        """Close what was opened with `token`, and all above it, which an exception left open. Return False if nothing
        was.
        """
        stack = self._stack()
        first = next((place for place, entry in enumerate(stack) if entry.token is token), None)
        if first is None:
            return False
        self._close_from(first)
        return True

    def leave(self, token: object) -> Call | None:
        """Close the innermost span of `token` and all above it. A module may be inside itself."""
        stack = self._stack()
        for place in range(len(stack) - 1, -1, -1):
            if stack[place].token is token:
                call = stack[place].call
                self._close_from(place)
                return call
        return None

    def close_while(self, leftover: Callable[[Call, bool], bool]) -> None:
        """Close from the top as long as `leftover(call, is backward)` holds."""
        stack = self._stack()
        while stack and leftover(stack[-1].call, stack[-1].backward):
            self._close_from(len(stack) - 1)

    def close_all(self) -> None:
        self._close_from(0)

    def _close_from(self, place: int) -> None:
        stack = self._stack()
        while len(stack) > place:
            entry = stack.pop()
            if entry.handle is not None:
                self._profiling.end(entry.handle)
