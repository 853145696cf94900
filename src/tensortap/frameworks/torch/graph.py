"""Torch's autograd graph: where gradients arrive, and which nodes send them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tensortap.frameworks.base import Remove
from tensortap.frameworks.capabilities import Consumer, Edge
from tensortap.frameworks.torch.access import access_build

__all__ = ["TorchGraph", "base_of"]


class TorchGraph:
    """The protocol `GradientGraph` of `frameworks.capabilities`."""

    def edge(self, tensor: torch.Tensor) -> Edge | None:
        if not tensor.requires_grad:
            return None
        if (access := access_build().loaded) is not None:  # each recorded step looks for it
            node, slot = access.gradient_edge(tensor)
        else:
            found = torch.autograd.graph.get_gradient_edge(tensor)
            node, slot = found.node, found.output_nr
        base = base_of(tensor)
        return Edge(node, slot, tuple(tensor.shape), self.edge(base) if base is not None else None)

    def consumers(self, outputs: Iterable[torch.Tensor], edges: Sequence[Edge], mark: int) -> list[Consumer]:
        if (access := access_build().loaded) is None:
            return self._search(outputs, edges, mark)
        bases = [(edge.base.node, edge.base.slot, at, False) for at, edge in enumerate(edges) if edge.base is not None]
        wanted = bases + [(edge.node, edge.slot, at, True) for at, edge in enumerate(edges)]
        return [Consumer(node, index, edges[at]) for node, index, at in access.consumers(list(outputs), wanted, mark)]

    def _search(self, outputs: Iterable[torch.Tensor], edges: Sequence[Edge], mark: int) -> list[Consumer]:
        """Variant of `consumers` in Python, which creates objects for each of a model's thousands of nodes."""
        wanted = {(edge.base.node, edge.base.slot): edge for edge in edges if edge.base is not None}
        wanted |= {(edge.node, edge.slot): edge for edge in edges}
        ends = {edge.node for edge in edges}
        visited: set[Any] = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
        waiting = list(visited)  # outputs that one operation made, as a split does, have one node
        found = []
        while waiting:
            node = waiting.pop()
            if node in ends or node._sequence_nr() < mark:  # made before the module ran, so not by it
                continue
            for index, (after, slot) in enumerate(node.next_functions):
                if after is None:
                    continue
                if (edge := wanted.get((after, slot))) is not None:
                    found.append(Consumer(node, index, edge))
                if after not in visited:
                    visited.add(after)
                    waiting.append(after)
        return found

    def on_node(self, node: Any, seen: Callable[[Sequence[Any] | None], None]) -> Remove | None:
        def hook(sent: tuple[Any, ...], _received: tuple[Any, ...]) -> None:
            seen(sent)

        return node.register_hook(hook).remove

    def count_uses(self, node: Any) -> Callable[[], int | None]:
        return lambda: None  # not needed: slots separate the edges

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of which this one is a reshaped view with the same elements."""
    base = tensor._base if tensor._is_view() else None
    if base is None or base.numel() != tensor.numel():
        return None
    is_whole = base.shape == tensor.shape and base.stride() == tensor.stride()  # in any memory format
    return base if is_whole or (base.is_contiguous() and tensor.is_contiguous()) else None
