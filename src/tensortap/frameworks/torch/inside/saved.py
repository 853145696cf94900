"""The values that a compiled forward saves for its backward, chosen on a copy of the graph that has no taps."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch._higher_order_ops.effects import with_effects
from torch.utils.checkpoint import CheckpointPolicy

from tensortap.core.interrupts import raise_interrupt

__all__ = ["changed_choice", "choose_as_untapped", "failures"]

_FAR = int(1e9)
_log = logging.getLogger("tensortap")


failures: dict[str, None] = {}
"""Reasons, as notices, for choices that may differ from those without taps."""


def changed_choice(why: str) -> str:
    """Return a notice that taps may change the choice."""
    return (
        f"taps may change which values the compiler of torch {torch.__version__} recomputes in backward, and so the "
        f"last digits of gradients ({why})"
    )


def choose_as_untapped(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return the compiler's function that chooses saved values, for graphs with taps."""

    def choose(joint_graph: Any, node_info: Any, *budget: Any, **named_budget: Any) -> list[Any]:
        if not any(map(_is_tap, joint_graph.nodes)):
            return original(joint_graph, node_info, *budget, **named_budget)
        try:
            untapped = _Untapped(joint_graph, node_info)
            return untapped.originals(original(untapped.graph, untapped.node_info, *budget, **named_budget))
        except Exception as error:  # a compiler of another form: a training must not end because it is tapped
            raise_interrupt(error)
            text = changed_choice(f"{type(error).__name__}: {error}")
            failures[text] = None
            _log.warning("tensortap: %s", text)
            return original(joint_graph, node_info, *budget, **named_budget)

    return choose


class _Untapped:
    """A copy of a joint graph of forward and backward, without taps."""

    def __init__(self, joint_graph: Any, node_info: Any) -> None:
        self.graph = torch.fx.Graph()
        self._tapped, self._tapped_info = joint_graph, node_info
        self._copies: dict[Any, Any] = {}
        """By the node of the tapped graph."""
        for node in joint_graph.nodes:
            if _is_tap(node):
                continue
            if (stands_for := _passes_on(node)) is None:
                self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
            elif stands_for in self._copies:
                copy = self._copies[node] = self._copies[stands_for]
                if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:  # between two regions
                    copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        self.node_info = self._copy_info()
        self._measure_distances()

    def originals(self, saved: list[Any]) -> list[Any]:
        """Return the nodes of the tapped graph for those that were chosen, and what taps in backward need."""
        firsts: dict[Any, Any] = {}
        for node, copy in self._copies.items():
            firsts.setdefault(copy, node)
        forward = self._tapped_info.is_required_fw
        in_backward = (node for node in self._tapped.nodes if _is_tap(node) and not forward(node))
        needed = [each for tap in in_backward for each in tap.all_input_nodes if forward(each)]
        return list(dict.fromkeys([*(firsts[copy] for copy in saved), *needed]))

    def _copy_info(self) -> Any:
        """Return the compiler's classes of nodes and their order, for the copies."""
        changed: dict[str, Any] = {}
        for field in fields(self._tapped_info):
            value = getattr(self._tapped_info, field.name)
            copies = dict.fromkeys(self._copies[node] for node in value if node in self._copies)
            is_order = isinstance(value, dict)
            changed[field.name] = {copy: i for i, copy in enumerate(copies)} if is_order else type(value)(copies)
        return replace(self._tapped_info, **changed)

    def _measure_distances(self) -> None:
        """Note for each node of forward how many steps it is away from backward."""
        for node in reversed(self.graph.nodes):
            if node.op == "output" or self.node_info.is_required_fw(node):
                steps = [user.dist_from_bw + 1 for user in node.users]
                node.dist_from_bw = min(steps, default=_FAR)
            else:
                node.dist_from_bw = 0


def _is_tap(node: Any) -> bool:
    return node.target is with_effects and torch.ops.tensortap.tap.default in node.args[:2]


def _passes_on(node: Any) -> Any | None:
    """Return the node whose value this one has because of a tap: a token, or the copy by `GradientTap`."""
    if node.target is operator.getitem and _is_tap(node.args[0]):
        return node.args[0].args[0]
    if node.target is torch.ops.aten.clone.default and any(map(_is_tap, node.users)):
        return node.args[0]
    return None
