"""The tree of modules that a page draws, derived from module names alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tensortap.core.records import display_name
from tensortap.report.wording import clean

__all__ = ["Modules"]

_DEEPEST = 64
"""Levels at which an ancestor without rows still gets a line. Below, a module hangs under its nearest listed ancestor,
so that one name of thousands of parts adds a few lines and not thousands of long ones."""


@dataclass(frozen=True)
class Modules:
    """Modules in preorder, siblings in execution order. A module's code is its position."""

    names: list[str]
    parents: list[int]
    classes: list[str]
    layers: list[int]
    """Index into `layer_codes`, or -1."""
    layer_codes: list[int]

    @classmethod
    def of(cls, classes: dict[str, str]) -> Modules:
        """Build the tree from module names in execution order, with their classes."""
        names, parents = _preorder(_tree(classes))
        code = {name: place for place, name in enumerate(names)}
        layer_of = {name: _layer(name) for name in names}
        used = list(dict.fromkeys(layer_of[name] for name in classes))
        place = {name: at for at, name in enumerate(used)}
        return cls(
            names=names,
            parents=parents,
            classes=[classes.get(name, "") for name in names],
            layers=[place.get(layer_of[name], -1) for name in names],
            layer_codes=[code[name] for name in used],
        )

    def object(self) -> dict[str, Any]:
        return {
            "name": self.names,
            "shown": [clean(display_name(name)) for name in self.names],
            "label": [clean(self._label(code)) for code in range(len(self.names))],
            "parent": self.parents,
            "cls": [clean(name) for name in self.classes],
            "layer": self.layers,
        }

    def layer_objects(self) -> list[dict[str, Any]]:
        return [{"module": code, "label": clean(display_name(self.names[code]))} for code in self.layer_codes]

    def _label(self, code: int) -> str:
        """Return the part of a name that its parent does not have."""
        name, parent = self.names[code], self.parents[code]
        if parent <= 0:  # the root, or right below it
            return display_name(name)
        return name[len(self.names[parent]) + 1 :] or "."


@dataclass(slots=True)
class _NamePart:
    """A part of a name. `name` is the whole name if the node gets a line."""

    name: str | None = None
    children: dict[str, _NamePart] = field(default_factory=dict)


def _tree(names: Iterable[str]) -> _NamePart:
    root = _NamePart("")
    for name in names:
        parts = _parts(name)
        listed = {len(parts), _layer_depth(parts)}
        node = root
        for depth, part in enumerate(parts, 1):
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = _NamePart()
            node = child
            if node.name is None and (depth <= _DEEPEST or depth in listed):
                node.name = ".".join(parts[:depth])
    return root


def _preorder(root: _NamePart) -> tuple[list[str], list[int]]:
    """Names of the nodes that get a line, and the position of the parent of each."""
    names: list[str] = []
    parents: list[int] = []
    stack = [(root, -1)]
    while stack:
        node, parent = stack.pop()
        if node.name is not None:
            names.append(node.name)
            parents.append(parent)
            parent = len(names) - 1
        stack.extend((child, parent) for child in reversed(node.children.values()))
    return names, parents


def _parts(name: str) -> list[str]:
    """Return the parts of a name. A leading dot belongs to the first part: the empty name is the root's own."""
    if not name:
        return []
    first, *rest = name[1:].split(".") if name.startswith(".") else name.split(".")
    return [f".{first}" if name.startswith(".") else first, *rest]


def _layer_depth(parts: list[str]) -> int:
    return next((depth for depth, part in enumerate(parts, 1) if part.isdecimal()), 1)


def _layer(name: str) -> str:
    """Return the part of the model that a module counts towards: its name up to a number, or its first part."""
    parts = _parts(name)
    return ".".join(parts[: _layer_depth(parts)])
