"""Spans in a framework's own profiler, and the graph nodes that a call made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from tensortap.frameworks.base import Framework, Remove, require
from tensortap.frameworks.capabilities import ProfilerSpans

__all__ = ["CallNode", "Profiling", "profiling_of"]


@dataclass(frozen=True, slots=True)
class CallNode:
    """A graph node that one call made."""

    node: Any
    last: bool
    """Whether it sends gradient out of the call: to an input or a parameter."""


class Profiling:
    """The framework's profiler, as `annotate` uses it."""

    by_node: bool
    """Whether graph nodes can be hooked; otherwise only the gradients of tensors can."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework

    def begin(self, name: str, light: bool = False) -> Any:
        """Open a span on this thread. A light one costs less and has no range on the device's lane."""
        raise NotImplementedError

    def end(self, span: Any) -> None:
        raise NotImplementedError

    def instant(self, name: str) -> None:
        self.end(self.begin(name))

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Return a span around work of this library, as cheap as the framework offers it."""
        return self._span(name)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        span = self.begin(name)
        try:
            yield
        finally:
            self.end(span)

    def recording(self) -> bool:
        """Return whether a profiler of the framework is recording."""
        raise NotImplementedError

    def idle_module(self) -> Any | None:
        """Return a module whose forward does nothing; None if calling one would have side effects."""
        raise NotImplementedError

    def anchors(self, inputs: Iterable[Any]) -> list[Any]:
        """Return the ends of the graph of these tensors before a call: nodes, or tensors if nodes cannot be hooked."""
        raise NotImplementedError

    def nodes(self, outputs: Iterable[Any], anchors: Sequence[Any], mark: int) -> list[CallNode]:
        """Return the nodes made since `mark` between `outputs` and the anchors of the inputs."""
        raise NotImplementedError

    def around_node(self, node: Any, before: Callable[[], None], after: Callable[[], None]) -> Sequence[Remove]:
        raise NotImplementedError

    def at_backward_end(self, callback: Callable[[], None]) -> bool:
        """Call back once when the current backward is over. Return False if that is impossible."""
        raise NotImplementedError


def profiling_of(framework: Framework) -> Profiling:
    """Return the adapter of the framework's profiler for `annotate`."""
    supported: ProfilerSpans = require(framework, ProfilerSpans, "annotating a model for a profiler")
    return supported.profiling()
