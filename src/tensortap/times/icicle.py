"""The tree of modules by their names, with what each spent: what an icicle is drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensortap.times.ledger import Ledger
from tensortap.times.marks import PHASES

__all__ = ["icicle_of"]


@dataclass
class _Node:
    module: str
    label: str
    parent: int
    cls: str = ""
    own: dict[str, list[float]] = field(default_factory=dict)
    """Microseconds of host and device by phase."""
    calls: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "label": self.label,
            "parent": self.parent,
            "class": self.cls,
            "own": self.own,
            "calls": self.calls,
        }


def icicle_of(ledger: Ledger) -> dict[str, Any]:
    """Return the nodes, each after its parent. A list of modules, which is never called, has a node, too."""
    tree = _Tree()
    for place, spent in ledger.spent(lambda place: place).items():
        node = tree.nodes[tree.node(place.module)]
        node.cls = node.cls or place.cls
        if spent.own or spent.device_own:
            amounts = node.own.setdefault(place.phase, [0.0, 0.0])
            amounts[0] += spent.own
            amounts[1] += spent.device_own
        if spent.pieces:
            node.calls[place.phase] = node.calls.get(place.phase, 0) + spent.pieces
    used = [phase for phase in PHASES if any(phase in node.own for node in tree.nodes)]
    return {"phases": used, "device": ledger.kernels > 0, "nodes": [node.as_dict() for node in tree.nodes]}


class _Tree:
    def __init__(self) -> None:
        self.nodes = [_Node("", "whole profile", -1)]
        self._numbers = {"": 0}

    def node(self, module: str) -> int:
        """Number of a module's node, which is made with all that lead to it if it is not there."""
        found = self._numbers.get(module)
        if found is None:
            head, _, label = module.rpartition(".")
            if module.startswith("("):
                parent, label = 0, module
            else:
                parent = self.node(head or "(root)")
            found = self._numbers[module] = len(self.nodes)
            self.nodes.append(_Node(module, label, parent))
        return found
