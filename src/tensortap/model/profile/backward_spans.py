"""Backward spans without touching the graph.

Module backward hooks put a node of their own into the graph, which breaks models that work in place. Here the nodes
that a call has made are found after it, and each of them opens and closes the spans of its call and of all enclosing
calls. A span that went on from node to node would begin inside one of the engine's own spans and end inside another:
a trace viewer drops such a span. So in torch a module's backward is as many pieces as it has nodes, each inside the
engine's span for that node, and module_times adds them up.

Paddle has no hook before a node, and its profiler breaks off at spans that do not nest with the engine's own. There
backward is marked by two moments a call: gradient has reached its output, and the gradients of its inputs are whole.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Protocol

from tensortap.frameworks.base import Framework, GradientCallback
from tensortap.frameworks.profiling import Profiling
from tensortap.model.profile.spans import Call, Spans
from tensortap.times.marks import AFTER, BEFORE

__all__ = ["Backward", "ByCall", "ByNode"]


class Backward(Protocol):
    """Places what backward will meet."""

    def returned(self, call: Call, outputs: list[Any]) -> None:
        """A call is over and these are its tensors."""

    def close(self) -> None:
        """Nothing more is to be shown. What hangs on calls is taken off by whoever holds the calls."""


class ByNode:
    """torch: a piece for each node, owned by the innermost call that has made it."""

    def __init__(self, profiling: Profiling, spans: Spans) -> None:
        self._profiling = profiling
        self._spans = spans
        self._local = threading.local()  # numbers of nodes that an inner call already owns

    def returned(self, call: Call, outputs: list[Any]) -> None:
        owned: set[int] = self._local.__dict__.setdefault("owned", set())
        for found in self._profiling.nodes(outputs, call.anchors, call.mark):
            number = found.node._sequence_nr()
            if number not in owned:
                owned.add(number)
                token = object()
                call.removes += self._profiling.around_node(
                    found.node, partial(self._begin, call, token), partial(self._end, token)
                )
        if not self._spans.in_forward():
            owned.clear()

    def close(self) -> None:
        """Every hook was on the call."""

    def _begin(self, call: Call, token: object) -> None:
        with self._profiling.mark(BEFORE):
            # Under reentrant checkpointing this node runs inside another node of an enclosing call, which is open.
            links = [link for link in call.chain() if not self._spans.in_backward(link)]
        for link in links:
            # Spans that only enclose that of a part are many; a heavy one for each would fill the profile.
            self._spans.open(link, f"backward {link.label}", token, backward=True, light=link is not links[-1])

    def _end(self, token: object) -> None:
        if self._spans.close(token):
            with self._profiling.mark(AFTER):
                pass


class ByCall:
    """paddle: `backward begins …` and `backward ends …`, two moments a call."""

    def __init__(self, profiling: Profiling, framework: Framework) -> None:
        self._profiling = profiling
        self._framework = framework
        self._running: list[Call] = []
        self._closed = False
        self._called: set[int] = set()  # of those, the ones that have not ended

    def returned(self, call: Call, outputs: list[Any]) -> None:
        for tensor in outputs:
            if not tensor.is_leaf:
                self._on_gradient(call, tensor, partial(self._begin, call))
        call.ways_out = sum(self._on_gradient(call, tensor, partial(self._sent, call)) for tensor in call.anchors)

    def _on_gradient(self, call: Call, tensor: Any, seen: GradientCallback) -> bool:
        remove = self._framework.on_gradient(tensor, seen)
        if remove is not None:
            call.removes.append(remove)
        return remove is not None

    def close(self) -> None:
        self._closed = True

    def _begin(self, call: Call, _: Any) -> None:
        if self._closed:
            return
        for link in call.chain():
            if link in self._running:
                continue
            if not self._running:
                self._profiling.at_backward_end(self._over)
            self._running.append(link)
            self._called.add(id(link))
            link.waiting = link.ways_out
            self._profiling.instant(f"backward begins {link.label}")

    def _sent(self, call: Call, _: Any) -> None:
        call.waiting -= 1
        if call.waiting == 0:
            self._end(call)

    def _end(self, call: Call) -> None:
        if id(call) in self._called and not self._closed:
            self._called.discard(id(call))
            self._profiling.instant(f"backward ends {call.label}")

    def _over(self) -> None:
        """Where no input takes a gradient, this is the end."""
        for call in reversed(self._running):
            self._end(call)
        self._running.clear()
        self._called.clear()
