"""Which module made each graph node that paddle's backward runs.

Paddle has no hook around a graph node. Its profile shows the nodes themselves, which kinds of nodes each module's
forward has created, and two moments a call: gradient reaches the outputs, and the gradients of the inputs are complete.
Between them, a node belongs to the innermost module that still has one of this kind to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tensortap.times.marks import Kind, Meaning
from tensortap.times.sweep import Span

__all__ = ["node_makers"]


@dataclass
class _Call:
    """A module between its two moments of backward."""

    meaning: Meaning
    left: Counter[str]
    """Kinds of nodes that it created and that have not run."""

    @property
    def depth(self) -> int:
        module = self.meaning.module
        return 0 if module == "(root)" else module.count(".") + 1


@dataclass
class _Node:
    index: int
    end: int
    meaning: Meaning
    maker: _Call | None = None
    active: tuple[_Call, ...] = ()


def node_makers(spans: Sequence[Span]) -> dict[int, tuple[Meaning, ...]]:
    """Return the makers of each node by the index of its span, from the outermost to the innermost."""
    return _Walk(spans).makers


class _Walk:
    def __init__(self, spans: Sequence[Span]) -> None:
        self.makers: dict[int, tuple[Meaning, ...]] = {}
        self._created: dict[tuple[str, str], list[Counter[str]]] = {}
        """For each module, what its calls created, the latest call last."""
        self._forward: list[tuple[int, Meaning, Counter[str]]] = []
        self._nodes: list[_Node] = []
        self._active: list[_Call] = []
        for index, (start, end, meaning) in enumerate(spans):
            self._close_until(start)
            self._take(index, end, meaning)
        self._close_until(None)

    def _take(self, index: int, end: int, meaning: Meaning) -> None:
        kind = meaning.kind
        if kind is Kind.MODULE:
            self._forward.append((end, meaning, Counter()))
        elif kind is Kind.CREATES and self._forward:
            self._forward[-1][2][meaning.module] += 1
        elif kind is Kind.NODE:
            self._nodes.append(_Node(index, end, meaning))
        elif kind is Kind.BEGINS:
            self._begin(meaning)
        elif kind is Kind.ENDS:
            self._active = [call for call in self._active if not _same(call.meaning, meaning)]
        elif kind is Kind.BACKWARD:
            self._active.clear()

    def _begin(self, meaning: Meaning) -> None:
        earlier = self._created.get((meaning.module, meaning.cls))
        call = _Call(meaning, earlier.pop() if earlier else Counter())
        self._active.append(call)
        if self._nodes:  # the moment is seen by the first node of the module
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

    def _assign(self, node: _Node) -> None:
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


def _same(one: Meaning, other: Meaning) -> bool:
    return (one.module, one.cls) == (other.module, other.cls)


def _encloses(outer: str, inner: str) -> bool:
    return outer != inner and (outer == "(root)" or inner.startswith(f"{outer}."))
