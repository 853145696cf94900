"""Inputs of one call that one operation made, where the framework does not tell which gradient is whose.

Paddle's graph says of the two halves of a split only that both are of the split. So what the module's nodes send is
kept until the split gets it, together with the gradient that arrives at each half: a hook on a tensor sees that of this
tensor alone, but summed over everybody who used it. The two say whose is whose, by what cannot mislead:

- a gradient whose shape only one of the tensors has is that one's;
- the engine adds in the memory of what arrives first, so a gradient in whose memory a sum lies is a part of that sum;
- if the whole backward sends the operation nothing but what this module does, the sums are the shares.

Values are never compared for it: gradients that are equal by chance are common. What remains untold is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensortap.frameworks.base import Edge, Framework, Gradient, Remove

__all__ = ["Siblings"]

_UNTOLD = "cannot be told from the gradients of other tensors that the same operation made: it is not recorded"


@dataclass(slots=True, eq=False)
class _Arrived:
    """A gradient, and a copy of it, since the engine may add to it. While it is held, no other gets its memory."""

    gradient: Any
    value: Any
    memory: int


@dataclass(slots=True, eq=False)
class Siblings:
    """The shares of some inputs of one call. It holds no node and no input: hooks on them hold it."""

    framework: Framework
    inputs: Sequence[tuple[tuple[int, ...], Gradient, Callable[[str], None]]]
    """Shape, who gets the share, and who is told why there is none."""
    waiting: int = 0
    """How many gradients the module has yet to send."""
    finished: bool = False
    _uses: Callable[[], int | None] = lambda: None
    _counted: int | None = None
    _taken: int = 0
    _sent: list[_Arrived] = field(default_factory=list)
    _sums: dict[int, _Arrived] = field(default_factory=dict)
    _spoiled: bool = False
    """Whether more than one backward has come by: the sums are then not of the same gradients."""

    def watch(self, edges: Sequence[Edge], guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Remove]:
        """Place hooks on the input tensors."""
        self._uses = self.framework.uses(edges[0].node)
        arrived = guard(self._arrive)
        placed = []
        for place, edge in enumerate(edges):
            now = self.framework.edge(edge.tensor)
            if (
                now is None or now.node is not edge.node
            ):  # changed in place meanwhile: a hook would see another gradient
                continue
            if (remove := self.framework.on_gradient(edge.tensor, partial(arrived, place))) is not None:
                placed.append(remove)
        return placed

    def take(self, gradient: Any) -> None:
        """One that the module sends to one of them."""
        self.waiting -= 1
        self._taken += 1
        self._spoiled = self._spoiled or self.waiting < 0
        if gradient is not None and not self.finished:
            self._sent.append(self._kept(gradient))

    def lose(self, why: str) -> None:
        """One of those that the module sends is not seen: of any of them a part may be missing."""
        self._settle({}, untold=range(len(self.inputs)), why=why)

    def finish(self) -> None:
        """All that comes has come."""
        if self.finished or not self._sent:
            return
        if shares := self._by_sender():
            self._settle(shares)
        else:
            shares = self._by_sum()
            self._settle(shares, untold=[place for place in range(len(self.inputs)) if place not in shares])

    def _arrive(self, place: int, gradient: Any | None) -> None:
        if self.finished or gradient is None:
            return
        if not self._sums:
            self._counted = self._uses()
        self._spoiled = self._spoiled or place in self._sums
        self._sums[place] = self._kept(gradient)
        if len(self._sums) == len(self.inputs) and not self.waiting:
            self.finish()

    def _kept(self, gradient: Any) -> _Arrived:
        return _Arrived(gradient, self.framework.copy(gradient), self.framework.memory(gradient))

    def _settle(self, shares: dict[int, Any], untold: Sequence[int] = (), why: str = _UNTOLD) -> None:
        if self.finished:
            return
        self.finished = True
        self._sent.clear()
        self._sums.clear()
        for place, (_, done, lost) in enumerate(self.inputs):
            if place in untold:
                lost(why)
            elif place in shares:
                done(shares[place])

    def _by_sender(self) -> dict[int, Any]:
        """The shares, if of every gradient it is known whose it is."""
        shares: dict[int, Any] = {}
        for arrived in self._sent:
            if (place := self._place_of(arrived)) is None:
                return {}
            known = shares.get(place)
            shares[place] = arrived.value if known is None else self.framework.add(known, arrived.value)
        return shares

    def _place_of(self, arrived: _Arrived) -> int | None:
        shape = tuple(arrived.value.shape)
        fitting = [place for place, (own, _, _) in enumerate(self.inputs) if own == shape]
        if len(fitting) == 1:
            return fitting[0]
        if self._spoiled or sum(other.memory == arrived.memory for other in self._sent) > 1:
            return None
        fitting = [place for place in fitting if place in self._sums and self._sums[place].memory == arrived.memory]
        return fitting[0] if len(fitting) == 1 and arrived.memory else None

    def _by_sum(self) -> dict[int, Any]:
        """The sums, if nobody else has sent anything."""
        if self._spoiled or self._counted != self._taken:
            return {}
        # A sum in other memory than what was sent has been replaced by a hook of the user's, or nothing was sent to it.
        sent = {arrived.memory for arrived in self._sent}
        return {place: arrived.value for place, arrived in self._sums.items() if arrived.memory in sent}
