"""grad_input: the part of an input's gradient that one module sends back.

A hook on the input tensor sees the sum over everything that used it. A private edge (a clone or a view put before the
module) would single the module out, but it also groups the sum differently, and the last bits of training would depend
on being watched. So nothing is inserted: the graph nodes that the module itself made and that feed the input's edge are
found after the call, and what each of them sends along that edge is added up. Where a framework does not tell which of
several edges a node feeds, `siblings.py` finds it out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from tensortap.capture.gradients.siblings import Siblings
from tensortap.frameworks.base import Consumer, Edge, Framework, Gradient, Remove

__all__ = ["Share", "Shares", "Watched"]

_UNWATCHED = "passes through a graph node that cannot be watched"


class Watched(NamedTuple):
    """One input whose share is wanted."""

    edge: Edge
    done: Gradient
    """Gets the finished share."""
    lost: Callable[[str], None]
    """OpaqueValue why there is none."""


@dataclass(slots=True, eq=False)
class Share:
    """One input of one call, collecting what flows back to it."""

    framework: Framework
    done: Gradient
    lost: Callable[[str], None]
    shape: tuple[int, ...]
    waiting: int = 0
    total: Any = None
    finished: bool = False

    def take(self, gradient: Any) -> None:
        self.waiting -= 1
        if gradient is not None and not self.finished:
            if tuple(gradient.shape) != self.shape:
                gradient = gradient.reshape(self.shape)
            # The engine may add to this very tensor later, so a sum that still waits needs a copy.
            if self.total is not None:
                self.total = self.framework.add(self.total, gradient)
            elif self.waiting:
                self.total = self.framework.copy(gradient)
            else:
                self.total = gradient
        if self.waiting <= 0:
            self.finish()

    def finish(self) -> None:
        if not self.finished and self.total is not None:
            self.finished = True
            total, self.total = self.total, None
            self.done(total)

    def lose(self, why: str) -> None:
        """A sum that lacks a part would be wrong."""
        if not self.finished:
            self.finished, self.total = True, None
            self.lost(why)


@dataclass(slots=True, eq=False)
class Shares:
    """Watches the graph for the shares of all calls in a step."""

    framework: Framework
    guard: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda hook: hook
    """Put around what the engine calls, and around the end: what goes wrong there must not break the step."""
    _open: list[Share | Siblings] = field(default_factory=list)

    def watch(self, inputs: Sequence[Watched], outputs: Sequence[Any], mark: int) -> list[Remove]:
        """After a call: place hooks on the nodes that feed the inputs' edges."""
        by_edge = {id(each.edge): each for each in inputs}
        takers: dict[int, Share | Siblings] = {}
        by_node: dict[int, list[tuple[Consumer, Share | Siblings]]] = defaultdict(list)
        placed: list[Remove] = []
        for consumer in self.framework.consumers(outputs, [each.edge for each in inputs], mark):
            edge = consumer.edge
            if (taker := takers.get(id(edge))) is None:
                first = by_edge[id(edge)]
                if consumer.rivals:
                    group = [first, *(by_edge[id(rival)] for rival in consumer.rivals)]
                    taker = Siblings(self.framework, [(each.edge.shape, each.done, each.lost) for each in group])
                    placed += taker.watch([each.edge for each in group], self.guard)
                else:
                    taker = Share(self.framework, first.done, first.lost, edge.shape)
                takers[id(edge)] = taker
            taker.waiting += 1
            by_node[id(consumer.node)].append((consumer, taker))
        self._open += takers.values()
        sent = self.guard(self._sent)
        for targets in by_node.values():
            feeds = [(consumer.index, taker) for consumer, taker in targets]
            if (remove := self.framework.on_node(targets[0][0].node, partial(sent, feeds))) is not None:
                placed.append(remove)
            else:
                self._sent(feeds, None)
        return placed

    def finish(self) -> None:
        """Backward is over: some nodes are never reached, and what has come by now is the whole share."""
        self.guard(self._finish_all)()
        self._open.clear()

    def _finish_all(self) -> None:
        for taker in self._open:
            taker.finish()

    def _sent(self, feeds: Sequence[tuple[int, Share | Siblings]], gradients: Sequence[Any] | None) -> None:
        for index, taker in feeds:
            if gradients is None:
                taker.lose(_UNWATCHED)
            else:
                taker.take(gradients[index] if index < len(gradients) else None)
