"""Backward spans without touching the graph.

Module backward hooks put a node of their own into the graph, which breaks models that work in place. Here the nodes
that a call has made are found after it, and each of them opens and closes the spans of its call and of all enclosing
calls. A span that went on from node to node would begin inside one of the engine's own spans and end inside another:
a trace viewer drops such a span. So in torch a module's backward is as many pieces as it has nodes, each inside the
engine's span for that node, and module_times adds them up.

Paddle has no hook before a node, and keeps Python's spans on a track of their own, where the engine's are not in the
way: there a call's span goes from its first output gradient to its last input gradient.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Protocol

from tensortap.frameworks.base import Framework
from tensortap.frameworks.profiling import Profiling
from tensortap.model.spans import Call, Spans

__all__ = ["Backward", "ByCall", "ByNode"]


class Backward(Protocol):
    """Places what backward will meet."""

    def returned(self, call: Call, outputs: list[Any]) -> None:
        """A call is over and these are its tensors."""


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
                    found.node, partial(self._begin, call, token), partial(self._spans.close, token)
                )
        if not self._spans.in_forward():
            owned.clear()

    def _begin(self, call: Call, token: object) -> None:
        # Under reentrant checkpointing this node runs inside another node of an enclosing call, which is open.
        for link in call.chain():
            if not self._spans.in_backward(link):
                self._spans.open(link, "backward", token)


class ByCall:
    """paddle: one span a call, cut where another call's work comes in between."""

    def __init__(self, profiling: Profiling, spans: Spans, framework: Framework) -> None:
        self._profiling = profiling
        self._spans = spans
        self._framework = framework
        self._running: list[Call] = []

    def returned(self, call: Call, outputs: list[Any]) -> None:
        for tensor in outputs:
            remove = self._framework.on_gradient(tensor, partial(self._begin, call))
            if remove is not None:
                call.removes.append(remove)
        for found in self._profiling.nodes(outputs, call.anchors, call.mark):
            removes = self._profiling.around_node(found.node, lambda: None, partial(self._sent, call))
            call.removes += removes
            call.waiting += bool(removes)

    def _begin(self, call: Call, _: Any) -> None:
        if call.begun:
            return
        call.begun = True
        if not self._running:
            self._profiling.at_backward_end(self._over)
        self._running.append(call)
        chain = call.chain()
        # What is open and does not enclose this call is done, or its end cannot be seen.
        self._spans.close_while(lambda other, backward: backward and other not in chain)
        for link in chain:
            if not self._spans.in_backward(link):
                self._spans.open(link, "backward", link)

    def _sent(self, call: Call) -> None:
        call.waiting -= 1
        if call.waiting == 0 and self._spans.in_backward(call):
            self._spans.close(call)

    def _over(self) -> None:
        self._spans.close_while(lambda _, backward: backward)
        for call in self._running:
            call.begun = False
        self._running.clear()
