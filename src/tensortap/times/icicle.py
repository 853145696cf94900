"""Data of the icicle chart: the tree of modules by name, with the time of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensortap.times.ledger import TimeLedger
from tensortap.times.marks import PHASES

__all__ = ["icicle_of"]


@dataclass
class _IcicleNode:
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


def icicle_of(ledger: TimeLedger) -> dict[str, Any]:
    """Return the nodes, each after its parent. A module list has a node, too, although it is never called."""
    tree = _IcicleTree()
    for place, usage in ledger.usage_by(lambda place: place).items():
        node = tree.nodes[tree.node(place.module)]
        node.cls = node.cls or place.cls
        if usage.own or usage.device_own:
            amounts = node.own.setdefault(place.phase, [0.0, 0.0])
            amounts[0] += usage.own
            amounts[1] += usage.device_own
        if usage.pieces:
            node.calls[place.phase] = node.calls.get(place.phase, 0) + usage.pieces
    used = [phase for phase in PHASES if any(phase in node.own for node in tree.nodes)]
    return {"phases": used, "device": ledger.kernels > 0, "nodes": [node.as_dict() for node in tree.nodes]}


class _IcicleTree:
    def __init__(self) -> None:
        self.nodes = [_IcicleNode("", "whole profile", -1)]
        self._numbers = {"": 0}

    def node(self, module: str) -> int:
        """Return the number of a module's node; create it, and the nodes above it, if missing."""
        found = self._numbers.get(module)
        if found is None:
            head, _, label = module.rpartition(".")
            if module.startswith("("):
                parent, label = 0, module
            else:
                parent = self.node(head or "(root)")
            found = self._numbers[module] = len(self.nodes)
            self.nodes.append(_IcicleNode(module, label, parent))
        return found
