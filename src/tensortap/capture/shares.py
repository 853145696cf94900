"""grad_input: the part of an input's gradient that one module sends back.

A hook on the input tensor sees the sum over everything that used it. A private edge (a clone or a view put before the
module) would single the module out, but it also groups the sum differently, and the last bits of training would depend
on being watched. So nothing is inserted: the graph nodes that the module itself made and that feed the input's edge are
found after the call, and what each of them sends along that edge is added up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensortap.frameworks.base import Consumer, Edge, Framework, Remove

__all__ = ["Share", "Shares"]


@dataclass(slots=True, eq=False)
class Share:
    """One input of one call, collecting what flows back to it."""

    done: Callable[[Any], None]
    shape: tuple[int, ...]
    waiting: int = 0
    total: Any = None
    finished: bool = False

    def finish(self) -> None:
        if not self.finished and self.total is not None:
            self.finished = True
            total, self.total = self.total, None
            self.done(total)


@dataclass(slots=True, eq=False)
class Shares:
    """Watches the graph for the shares of all calls in a step."""

    framework: Framework
    _open: list[Share] = field(default_factory=list)

    def watch(
        self,
        inputs: Sequence[tuple[Edge, Callable[[Any], None]]],
        outputs: Sequence[Any],
        mark: int,
        lost: Callable[[Edge], None],
    ) -> list[Remove]:
        """After a call: place hooks on the nodes that feed the inputs' edges. `done` gets each finished
        share; `lost` the edge of one that passes through a node which cannot be watched."""
        shares = {id(edge): Share(done, edge.shape) for edge, done in inputs}
        by_node: dict[int, list[Consumer]] = defaultdict(list)
        for consumer in self.framework.consumers(outputs, [edge for edge, _ in inputs], mark):
            shares[id(consumer.edge)].waiting += 1
            by_node[id(consumer.node)].append(consumer)
        self._open += [share for share in shares.values() if share.waiting]
        placed = []
        for consumers in by_node.values():
            targets = [(consumer.index, shares[id(consumer.edge)]) for consumer in consumers]
            remove = self.framework.on_node(consumers[0].node, partial(self._sent, targets))
            if remove is not None:
                placed.append(remove)
                continue
            for consumer, (_, share) in zip(consumers, targets, strict=True):
                share.finished = True  # a sum that lacks a part would be wrong
                lost(consumer.edge)
        return placed

    def finish(self) -> None:
        """Backward is over: some nodes are never reached, and what has come by now is the whole share."""
        for share in self._open:
            share.finish()
        self._open.clear()

    def _sent(self, targets: Sequence[tuple[int, Share]], gradients: Sequence[Any]) -> None:
        for index, share in targets:
            gradient = gradients[index] if index < len(gradients) else None
            share.waiting -= 1
            if gradient is not None and not share.finished:
                if tuple(gradient.shape) != share.shape:
                    gradient = gradient.reshape(share.shape)
                # The engine may add to this very tensor later, so a sum that still waits needs a copy.
                if share.total is not None:
                    share.total = self.framework.add(share.total, gradient)
                elif share.waiting:
                    share.total = self.framework.copy(gradient)
                else:
                    share.total = gradient
            if share.waiting <= 0:
                share.finish()
