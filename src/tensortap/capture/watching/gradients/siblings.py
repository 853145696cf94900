"""Inputs of one call that one operation made, where the framework does not report which gradient belongs to which.

For the two halves of a split, Paddle's graph shows only that both come from the split. So the gradients that the
module's nodes send are kept until the split receives them, together with the gradient that arrives at each half. A hook
on a tensor sees the gradient of this tensor alone, but summed over all its uses. Three rules attribute the gradients;
none of them can attribute one wrongly:

- a gradient whose shape only one of the tensors has belongs to that one;
- the engine adds in the memory of what arrives first, so a gradient whose memory holds a sum is a part of that sum;
- if the whole backward sends the operation only what this module sends, the sums are the shares.

Values are never compared, because gradients are often equal by chance. An ambiguous gradient is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensortap.frameworks.base import Framework, GradientCallback, Remove
from tensortap.frameworks.capabilities import Edge, GradientGraph

__all__ = ["SiblingInputs"]

_AMBIGUOUS = "cannot be separated from the gradients of other tensors that the same operation made: it is not recorded"


@dataclass(slots=True, eq=False)
class _Arrived:
    """A gradient and a copy of it, since the engine may add to it. Holding it keeps its memory from being reused."""

    gradient: Any
    value: Any
    address: int


@dataclass(slots=True, eq=False)
class SiblingInputs:
    """The shares of some inputs of one call. It holds no node and no input: hooks on them hold it."""

    framework: Framework
    graph: GradientGraph
    inputs: Sequence[tuple[tuple[int, ...], GradientCallback, Callable[[str], None]]]
    """Shape, the callback for the share, and the callback for the reason if there is none."""
    waiting: int = 0
    """Number of gradients that the module has yet to send."""
    finished: bool = False
    _count_uses: Callable[[], int | None] = lambda: None
    _uses: int | None = None
    _taken: int = 0
    _sent: list[_Arrived] = field(default_factory=list)
    _sums: dict[int, _Arrived] = field(default_factory=dict)
    _several_backwards: bool = False
    """Whether more than one backward ran: the sums are then not of the same gradients."""

    def watch(self, edges: Sequence[Edge], guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Remove]:
        """Place hooks on the input tensors."""
        self._count_uses = self.graph.count_uses(edges[0].node)
        arrived = guard(self._arrive)
        placed = []
        for index, edge in enumerate(edges):
            now = self.graph.edge(edge.tensor)
            if now is None or now.node is not edge.node:  # changed in place: a hook would see another gradient
                continue
            if (remove := self.framework.on_gradient(edge.tensor, partial(arrived, index))) is not None:
                placed.append(remove)
        return placed

    def take(self, gradient: Any) -> None:
        """Keep a gradient that the module sends to one of the inputs."""
        self.waiting -= 1
        self._taken += 1
        self._several_backwards = self._several_backwards or self.waiting < 0
        if gradient is not None and not self.finished:
            self._sent.append(self._copied(gradient))

    def skip(self, why: str) -> None:
        """Discard all shares: one gradient was not seen, so any of them may lack a part."""
        self._conclude({}, skipped=range(len(self.inputs)), why=why)

    def finish(self) -> None:
        """Attribute the gradients, once all have arrived."""
        if self.finished or not self._sent:
            return
        if shares := self._by_sender():
            self._conclude(shares)
        else:
            shares = self._by_sum()
            self._conclude(shares, skipped=[index for index in range(len(self.inputs)) if index not in shares])

    def _arrive(self, index: int, gradient: Any | None) -> None:
        if self.finished or gradient is None:
            return
        if not self._sums:
            self._uses = self._count_uses()
        self._several_backwards = self._several_backwards or index in self._sums
        self._sums[index] = self._copied(gradient)
        if len(self._sums) == len(self.inputs) and not self.waiting:
            self.finish()

    def _copied(self, gradient: Any) -> _Arrived:
        return _Arrived(gradient, self.framework.copy(gradient), self.graph.address(gradient))

    def _conclude(self, shares: dict[int, Any], skipped: Sequence[int] = (), why: str = _AMBIGUOUS) -> None:
        if self.finished:
            return
        self.finished = True
        self._sent.clear()
        self._sums.clear()
        for index, (_, done, report_skipped) in enumerate(self.inputs):
            if index in skipped:
                report_skipped(why)
            elif index in shares:
                done(shares[index])

    def _by_sender(self) -> dict[int, Any]:
        """Return the shares if the input of every gradient is known, else nothing."""
        shares: dict[int, Any] = {}
        for arrived in self._sent:
            if (index := self._input_of(arrived)) is None:
                return {}
            known = shares.get(index)
            shares[index] = arrived.value if known is None else self.framework.add(known, arrived.value)
        return shares

    def _input_of(self, arrived: _Arrived) -> int | None:
        shape = tuple(arrived.value.shape)
        fitting = [index for index, (own, _, _) in enumerate(self.inputs) if own == shape]
        if len(fitting) == 1:
            return fitting[0]
        if self._several_backwards or sum(other.address == arrived.address for other in self._sent) > 1:
            return None
        fitting = [index for index in fitting if index in self._sums and self._sums[index].address == arrived.address]
        return fitting[0] if len(fitting) == 1 and arrived.address else None

    def _by_sum(self) -> dict[int, Any]:
        """Return the sums as shares if nothing else has sent a gradient, else nothing."""
        if self._several_backwards or self._uses != self._taken:
            return {}
        # A sum in other memory than that of a sent gradient was replaced by a user's hook, or received nothing.
        sent = {arrived.address for arrived in self._sent}
        return {index: arrived.value for index, arrived in self._sums.items() if arrived.address in sent}
