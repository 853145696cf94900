"""Backward spans without changing the graph.

Module backward hooks insert a node into the graph, which breaks models that work in place. Instead, the nodes that a
call created are found after it, and each node opens and closes the spans of its call and of all enclosing calls. A span
over several nodes would begin inside one of the engine's spans and end inside another, and trace viewers drop such a
span. In torch, a module's backward therefore has one span per node, inside the engine's span for that node, and
module_times sums them.

Paddle has no hook before a node, and its profiler fails on spans that do not nest with the engine's. There, two moments
mark the backward of a call: gradient reaches its output, and the gradients of its inputs are complete.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Protocol

from tensortap.frameworks.base import Framework, GradientCallback
from tensortap.frameworks.profiling import Profiling
from tensortap.model.profile.spans import AnnotatedCall, OpenSpans
from tensortap.times.marks import AFTER, BEFORE

__all__ = ["BackwardMarks", "CallMoments", "NodeSpans"]


class BackwardMarks(Protocol):
    """Places the hooks that mark a call's backward."""

    def on_return(self, call: AnnotatedCall, outputs: list[Any]) -> None:
        """Place hooks on the outputs of a call that has returned."""

    def close(self) -> None:
        """Mark nothing any more. The owner of the calls removes their hooks."""


class NodeSpans:
    """Torch: a span for each node, owned by the innermost call that created the node."""

    def __init__(self, profiling: Profiling, spans: OpenSpans) -> None:
        self._profiling = profiling
        self._spans = spans
        self._local = threading.local()  # numbers of nodes that an inner call already owns

    def on_return(self, call: AnnotatedCall, outputs: list[Any]) -> None:
        owned: set[int] = self._local.__dict__.setdefault("owned", set())
        for found in self._profiling.nodes(outputs, call.anchors, call.mark):
            number = found.node._sequence_nr()
            if number not in owned:
                owned.add(number)
                token = object()
                call.removers += self._profiling.around_node(
                    found.node, partial(self._begin, call, token), partial(self._end, token)
                )
        if not self._spans.in_forward():
            owned.clear()

    def close(self) -> None:
        """Do nothing: all hooks belong to calls."""

    def _begin(self, call: AnnotatedCall, token: object) -> None:
        with self._profiling.mark(BEFORE):
            # Under reentrant checkpointing, this node runs inside a node of an enclosing call whose span is open.
            links = [link for link in call.chain() if not self._spans.in_backward(link)]
        for link in links:
            # Spans that only enclose a submodule's span are many, and heavy ones would fill the profile.
            self._spans.open(link, f"backward {link.label}", token, backward=True, light=link is not links[-1])

    def _end(self, token: object) -> None:
        if self._spans.close(token):
            with self._profiling.mark(AFTER):
                pass


class CallMoments:
    """Paddle: `backward begins …` and `backward ends …`, two moments per call."""

    def __init__(self, profiling: Profiling, framework: Framework) -> None:
        self._profiling = profiling
        self._framework = framework
        self._running: list[AnnotatedCall] = []
        self._closed = False
        self._unfinished: set[int] = set()  # ids of the running calls that have not ended

    def on_return(self, call: AnnotatedCall, outputs: list[Any]) -> None:
        for tensor in outputs:
            if not tensor.is_leaf:
                self._on_gradient(call, tensor, partial(self._begin, call))
        call.exits = sum(
            self._on_gradient(call, tensor, partial(self._on_input_gradient, call)) for tensor in call.anchors
        )

    def _on_gradient(self, call: AnnotatedCall, tensor: Any, seen: GradientCallback) -> bool:
        remove = self._framework.on_gradient(tensor, seen)
        if remove is not None:
            call.removers.append(remove)
        return remove is not None

    def close(self) -> None:
        self._closed = True

    def _begin(self, call: AnnotatedCall, _: Any) -> None:
        if self._closed:
            return
        for link in call.chain():
            if link in self._running:
                continue
            if not self._running:
                self._profiling.at_backward_end(self._on_backward_end)
            self._running.append(link)
            self._unfinished.add(id(link))
            link.pending_exits = link.exits
            self._profiling.instant(f"backward begins {link.label}")

    def _on_input_gradient(self, call: AnnotatedCall, _: Any) -> None:
        call.pending_exits -= 1
        if call.pending_exits == 0:
            self._end(call)

    def _end(self, call: AnnotatedCall) -> None:
        if id(call) in self._unfinished and not self._closed:
            self._unfinished.discard(id(call))
            self._profiling.instant(f"backward ends {call.label}")

    def _on_backward_end(self) -> None:
        """End the calls whose inputs take no gradient."""
        for call in reversed(self._running):
            self._end(call)
        self._running.clear()
        self._unfinished.clear()
