"""Annotated calls and their open spans: one stack per thread, so that spans always nest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensortap.frameworks.base import Remove
from tensortap.frameworks.profiling import Profiling

__all__ = ["AnnotatedCall", "OpenSpans"]


@dataclass(eq=False)
class AnnotatedCall:
    """One call of one module. It lives as long as the graph that it created."""

    label: str
    """`layers.0.fc1 (Linear)`"""
    parent: AnnotatedCall | None
    mark: int
    anchors: list[Any]
    """Graph anchors of the inputs; released when the call returns."""
    removers: list[Remove] = field(default_factory=list)
    exits: int = 0
    """Number of inputs that take a gradient, for `CallMoments`."""
    pending_exits: int = 0

    def chain(self) -> list[AnnotatedCall]:
        """Return the enclosing calls, outermost first, and this one."""
        found: list[AnnotatedCall] = []
        call: AnnotatedCall | None = self
        while call is not None:
            found.append(call)
            call = call.parent
        return found[::-1]


class _OpenSpan(NamedTuple):
    call: AnnotatedCall
    backward: bool
    token: object
    """Spans opened with the same token are closed together."""
    handle: Any


class OpenSpans:
    """The open spans of each thread. Closing a span first closes all spans opened after it."""

    def __init__(self, profiling: Profiling) -> None:
        self._profiling = profiling
        self._local = threading.local()

    def _stack(self) -> list[_OpenSpan]:
        stack: list[_OpenSpan] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def top(self) -> AnnotatedCall | None:
        """Return the innermost call that is running on this thread."""
        stack = self._stack()
        return stack[-1].call if stack else None

    def open(
        self, call: AnnotatedCall, name: str | None, token: object, *, backward: bool = False, light: bool = False
    ) -> None:
        """Open a span of this name. None pushes the call without a span in the profile."""
        handle = None if name is None else self._profiling.begin(name, light)
        self._stack().append(_OpenSpan(call, backward, token, handle))

    def in_forward(self) -> bool:
        """Return whether a module's forward is running on this thread."""
        return any(not entry.backward for entry in self._stack())

    def in_backward(self, call: AnnotatedCall) -> bool:
        return any(entry.backward and entry.call is call for entry in self._stack())

    def close(self, token: object) -> bool:
        """Close the spans opened with `token`, and all above them that an exception left open.

        Return False if there are none.
        """
        stack = self._stack()
        first = next((place for place, entry in enumerate(stack) if entry.token is token), None)
        if first is None:
            return False
        self._close_from(first)
        return True

    def close_innermost(self, token: object) -> AnnotatedCall | None:
        """Close the innermost span of `token` and all above it; return its call. A module may run inside itself."""
        stack = self._stack()
        for place in range(len(stack) - 1, -1, -1):
            if stack[place].token is token:
                call = stack[place].call
                self._close_from(place)
                return call
        return None

    def close_while(self, is_leftover: Callable[[AnnotatedCall, bool], bool]) -> None:
        """Close spans from the top while `is_leftover(call, is backward)` holds."""
        stack = self._stack()
        while stack and is_leftover(stack[-1].call, stack[-1].backward):
            self._close_from(len(stack) - 1)

    def close_all(self) -> None:
        self._close_from(0)

    def _close_from(self, place: int) -> None:
        stack = self._stack()
        while len(stack) > place:
            entry = stack.pop()
            if entry.handle is not None:
                self._profiling.end(entry.handle)
