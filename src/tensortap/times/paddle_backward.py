"""Find the module that created each graph node of paddle's backward.

Paddle has no hook around a graph node. Its profile shows the nodes, which kinds of nodes each module's forward created,
and two moments per call: gradient reaches the outputs, and the gradients of the inputs are complete. Between these
moments, a node belongs to the innermost module that still has a node of this kind to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tensortap.times.marks import SpanKind, SpanMeaning
from tensortap.times.sweep import TimedSpan

__all__ = ["node_makers"]


@dataclass
class _BackwardCall:
    """A module between its two moments of backward."""

    meaning: SpanMeaning
    left: Counter[str]
    """Number of nodes, by kind, that the module created and that have not run."""

    @property
    def depth(self) -> int:
        module = self.meaning.module
        return 0 if module == "(root)" else module.count(".") + 1


@dataclass
class _GraphNode:
    index: int
    end: int
    meaning: SpanMeaning
    maker: _BackwardCall | None = None
    active: tuple[_BackwardCall, ...] = ()


def node_makers(spans: Sequence[TimedSpan]) -> dict[int, tuple[SpanMeaning, ...]]:
    """Return the modules that created each node, outermost first, by the index of the node's span."""
    return _NodeAssignment(spans).makers


class _NodeAssignment:
    def __init__(self, spans: Sequence[TimedSpan]) -> None:
        self.makers: dict[int, tuple[SpanMeaning, ...]] = {}
        self._created: dict[tuple[str, str], list[Counter[str]]] = {}
        """For each module, the kinds of nodes that its calls created, the latest call last."""
        self._forward: list[tuple[int, SpanMeaning, Counter[str]]] = []
        self._nodes: list[_GraphNode] = []
        self._active: list[_BackwardCall] = []
        for index, (start, end, meaning) in enumerate(spans):
            self._close_until(start)
            self._add(index, end, meaning)
        self._close_until(None)

    def _add(self, index: int, end: int, meaning: SpanMeaning) -> None:
        kind = meaning.kind
        if kind is SpanKind.MODULE:
            self._forward.append((end, meaning, Counter()))
        elif kind is SpanKind.CREATES and self._forward:
            self._forward[-1][2][meaning.module] += 1
        elif kind is SpanKind.NODE:
            self._nodes.append(_GraphNode(index, end, meaning))
        elif kind is SpanKind.BEGINS:
            self._begin(meaning)
        elif kind is SpanKind.ENDS:
            self._active = [call for call in self._active if not _same(call.meaning, meaning)]
        elif kind is SpanKind.BACKWARD:
            self._active.clear()

    def _begin(self, meaning: SpanMeaning) -> None:
        earlier = self._created.get((meaning.module, meaning.cls))
        call = _BackwardCall(meaning, earlier.pop() if earlier else Counter())
        self._active.append(call)
        if self._nodes:  # the moment falls into the first node of the module
            node = self._nodes[-1]
            if node.maker is None or call.depth >= node.maker.depth:
                node.maker = call

    def _close_until(self, start: int | None) -> None:
        while self._forward and (start is None or self._forward[-1][0] <= start):
            _, meaning, created = self._forward.pop()
            if created:
                self._created.setdefault((meaning.module, meaning.cls), []).append(created)
        while self._nodes and (start is None or self._nodes[-1].end <= start):
            self._assign(self._nodes.pop())

    def _assign(self, node: _GraphNode) -> None:
        kind = node.meaning.module
        maker = node.maker
        if maker is None:
            having = [call for call in self._active if call.left[kind] > 0]
            deepest = max((call.depth for call in having), default=-1)
            maker = next((call for call in having if call.depth == deepest), self._active[-1] if self._active else None)
        if maker is None:
            return
        maker.left[kind] -= 1
        around = [call for call in self._active if _encloses(call.meaning.module, maker.meaning.module)]
        around.sort(key=lambda call: call.depth)
        self.makers[node.index] = (*(call.meaning for call in around), maker.meaning)


def _same(one: SpanMeaning, other: SpanMeaning) -> bool:
    return (one.module, one.cls) == (other.module, other.cls)


def _encloses(outer: str, inner: str) -> bool:
    return outer != inner and (outer == "(root)" or inner.startswith(f"{outer}."))
