"""Paddle's autograd graph, which exposes less than torch's.

A node reports the nodes it sends gradients to, but not to which of their inputs: all outputs of one operation, such as
a split, look alike. `capture.gradients.siblings` attributes the gradients in backward, with the functions of this file.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tensortap.frameworks.capabilities import Consumer, Edge

__all__ = ["UseCounts", "can_hook", "consumers", "in_order", "inside_backward"]

# Paddle does not number graph nodes, so a walk that leaves its module is stopped by count.
_MOST_NODES = 20_000
# A hook must return what the node sends, but paddle accepts no lists: backward fails whatever is returned.
_SEND_LISTS = (
    "AddN",
    "BroadcastTensors",
    "Concat",
    "CudnnLstm",
    "Einsum",
    "GradNodeLegacyRunProgram",
    "GradNodeRunProgram",
    "Meshgrid",
    "MultiDot",
    "Multiplex",
    "PartialConcat",
    "PartialSum",
    "RnnGrad",
    "RunCustomOp",
    "Stack",
)
_ROOTS = {"tensor_patch_methods.py": "self", "backward_mode.py": "tensors"}
"""The files in which Python calls backward, and the variable that holds its tensors."""


def can_hook(node: Any) -> bool:
    """Return whether a hook on this node runs, and leaves backward intact."""
    name = node.name()
    return "PyLayer" not in name and not name.startswith(_SEND_LISTS)


def consumers(outputs: Iterable[Any], edges: Sequence[Edge]) -> list[Consumer]:
    """Implement `GradientGraph.consumers`."""
    wanted: dict[int, list[Edge]] = {}
    for edge in edges:
        wanted.setdefault(edge.node.node_ptr(), []).append(edge)
    nodes = {node.node_ptr(): node for tensor in outputs if (node := tensor.grad_fn) is not None}
    waiting, visited = list(nodes.values()), set(nodes)  # outputs that one operation made have one node
    found = []
    while waiting and len(visited) < _MOST_NODES:
        node = waiting.pop()
        if node.node_ptr() in wanted:
            continue
        for index, after in enumerate(node.next_functions):
            if after is None:
                continue
            if (fed := wanted.get(after.node_ptr())) is not None:
                found.append(Consumer(node, index, fed[0], tuple(fed[1:])))
            if after.node_ptr() not in visited:
                visited.add(after.node_ptr())
                waiting.append(after)
    return found


def in_order(sent: Sequence[Any], goes_on: Sequence[bool]) -> list[Any] | None:
    """Return the gradients that a node sends, in the order of its next functions, some of which lead nowhere; None if
    unknown.

    A node may have gradients for more inputs than next functions, as for the condition of `where`.
    """
    given = [gradient if gradient._is_initialized() else None for gradient in sent]
    if len(given) == len(goes_on):
        return given
    there = [gradient for gradient in given if gradient is not None]
    if len(there) != sum(goes_on):
        return None
    return [there.pop(0) if goes else None for goes in goes_on]


class UseCounts:
    """The number of gradients that the current backward sends to each node."""

    def __init__(self) -> None:
        self._roots: list[tuple[weakref.ref[Any], int]] = []
        self._counts: Counter[int] = Counter()

    def of(self, address: int) -> int | None:
        """Return the count for a node's address; None if the start of this backward is unknown."""
        if not (roots := _roots()):
            return None
        if not self._counted_for(roots):
            self._counts = _count(roots)
            self._roots = [(weakref.ref(root), root.grad_fn.node_ptr()) for root in roots]
        return self._counts[address]

    def _counted_for(self, roots: Sequence[Any]) -> bool:
        """Return whether these roots were counted last. While they live, their graph does, and addresses stay valid."""
        known = [(reference(), address) for reference, address in self._roots]
        now = [(root, root.grad_fn.node_ptr()) for root in roots]
        return len(known) == len(now) and all(a is b and p == q for (a, p), (b, q) in zip(known, now, strict=True))


def inside_backward() -> bool:
    """Return whether the caller runs inside a backward of paddle's engine."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("backward", "grad") and "paddle" in code.co_filename:
            return True
        frame = frame.f_back
    return False


def _roots() -> list[Any]:
    """Return the tensors that the innermost backward began with, from the stack: paddle does not report them."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename.replace("\\", "/").rpartition("/")[2]
        if "paddle" in code.co_filename and code.co_name == "grad":
            return []  # paddle.grad skips nodes that do not lead to its inputs
        if code.co_name == "backward" and (name := _ROOTS.get(file)) is not None:
            found = frame.f_locals.get(name)
            roots = list(found) if isinstance(found, list | tuple) else [found]
            return roots if all(getattr(root, "grad_fn", None) is not None for root in roots) else []
        frame = frame.f_back
    return []


def _count(roots: Sequence[Any]) -> Counter[int]:
    nodes = [root.grad_fn for root in roots]
    counts = Counter(node.node_ptr() for node in nodes)  # a root receives its gradient from outside of the graph
    waiting = list({node.node_ptr(): node for node in nodes}.values())
    visited = set(counts)
    while waiting:
        for after in waiting.pop().next_functions:
            if after is None:
                continue
            counts[after.node_ptr()] += 1
            if after.node_ptr() not in visited:
                visited.add(after.node_ptr())
                waiting.append(after)
    return counts
