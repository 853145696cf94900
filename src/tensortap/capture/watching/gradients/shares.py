"""grad_input: the share of an input's gradient that one module contributes.

A hook on the input tensor sees the sum over everything that used it. A private edge (a clone or a view before the
module) would isolate the module's share. It would also change the grouping of the sum, so the last bits of training
would depend on the tap. Therefore nothing is inserted. After the call, the graph nodes are found that the module made
and that feed the input's edge. The gradients that these nodes send along the edge are added up. `siblings.py` handles
frameworks that do not report which of several edges a node feeds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from tensortap.capture.watching.gradients.siblings import SiblingInputs
from tensortap.frameworks.base import Framework, GradientCallback, Remove
from tensortap.frameworks.capabilities import Consumer, Edge, GradientGraph

__all__ = ["GradientShare", "InputGradients", "WatchedInput"]

_UNHOOKABLE = "passes through a graph node that cannot be watched"


class WatchedInput(NamedTuple):
    """One input whose share is recorded."""

    edge: Edge
    done: GradientCallback
    """Called with the complete share."""
    skipped: Callable[[str], None]
    """Called with the reason if there is no share."""


@dataclass(slots=True, eq=False)
class GradientShare:
    """One input of one call, which collects the gradients that the call sends to it."""

    framework: Framework
    done: GradientCallback
    skipped: Callable[[str], None]
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

    def skip(self, why: str) -> None:
        """Discard the share: a sum that lacks a part would be wrong."""
        if not self.finished:
            self.finished, self.total = True, None
            self.skipped(why)


_Taker = GradientShare | SiblingInputs


@dataclass(slots=True, eq=False)
class InputGradients:
    """Watches the graph for the shares of all calls in a step."""

    framework: Framework
    graph: GradientGraph
    guard: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda hook: hook
    """Wraps every callback of the engine, and the end, so that an error there does not break the step."""
    _open: list[_Taker] = field(default_factory=list)

    def watch(self, inputs: Sequence[WatchedInput], outputs: Sequence[Any], mark: int) -> list[Remove]:
        """Place hooks, after a call, on the nodes that feed the inputs' edges."""
        by_edge = {id(each.edge): each for each in inputs}
        takers: dict[int, _Taker] = {}
        by_node: dict[int, list[tuple[Consumer, _Taker]]] = defaultdict(list)
        placed: list[Remove] = []
        for consumer in self.graph.consumers(outputs, [each.edge for each in inputs], mark):
            edge = consumer.edge
            if (taker := takers.get(id(edge))) is None:
                first = by_edge[id(edge)]
                if consumer.rivals:
                    group = [first, *(by_edge[id(rival)] for rival in consumer.rivals)]
                    siblings = [(each.edge.shape, each.done, each.skipped) for each in group]
                    taker = SiblingInputs(self.framework, self.graph, siblings)
                    placed += taker.watch([each.edge for each in group], self.guard)
                else:
                    taker = GradientShare(self.framework, first.done, first.skipped, edge.shape)
                takers[id(edge)] = taker
            taker.waiting += 1
            by_node[id(consumer.node)].append((consumer, taker))
        self._open += takers.values()
        sent = self.guard(self._sent)
        for targets in by_node.values():
            feeds = [(consumer.index, taker) for consumer, taker in targets]
            if (remove := self.graph.on_node(targets[0][0].node, partial(sent, feeds))) is not None:
                placed.append(remove)
            else:
                self._sent(feeds, None)
        return placed

    def finish(self) -> None:
        """Complete all shares after backward. Nodes that backward did not reach contribute nothing."""
        self.guard(self._finish_all)()
        self._open.clear()

    def _finish_all(self) -> None:
        for taker in self._open:
            taker.finish()

    def _sent(self, feeds: Sequence[tuple[int, _Taker]], gradients: Sequence[Any] | None) -> None:
        for index, taker in feeds:
            if gradients is None:
                taker.skip(_UNHOOKABLE)
            else:
                taker.take(gradients[index] if index < len(gradients) else None)
