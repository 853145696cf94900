"""Describes a model for mapping: its modules in the order of their definition, and the tensors that each owns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["ModelOutline", "ModuleOutline", "TensorOutline", "full_name"]


@dataclass(frozen=True, slots=True)
class TensorOutline:
    """A parameter or buffer of a module."""

    shape: tuple[int, ...]
    kind: str = "param"
    """param | buffer"""
    tied: str = ""
    """The full name under which the same tensor appears first; empty if this is the first."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleOutline:
    """A module, with its name from the root."""

    name: str
    cls: str
    tensors: dict[str, TensorOutline] = field(default_factory=dict)
    called: int | None = None
    """Position of its first call in the order of execution; None if unknown, or if it was never called."""
    base: str = ""
    """The framework's own class that it inherits from; empty if it is such a class itself."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names under which rules may list it."""
        return (self.cls, self.base) if self.base else (self.cls,)


class ModelOutline:
    """All modules of a model by name. The names define the tree."""

    def __init__(self, framework: str, modules: Iterable[ModuleOutline]) -> None:
        self.framework = framework
        self.modules = {module.name: module for module in modules}
        self.modules.setdefault("", ModuleOutline("", ""))
        self._children: dict[str, list[str]] = {name: [] for name in self.modules}
        for name in self.modules:
            if name:
                self._children[self.parent(name)].append(name)
        self._ordered = {name: self._order(children) for name, children in self._children.items()}
        self._leaves: dict[str, list[str]] = {}

    def parent(self, name: str) -> str:
        """Return the nearest recorded module above; modules in between may not have been recorded."""
        while name:
            name = name.rpartition(".")[0]
            if name in self.modules:
                break
        return name

    def above(self, name: str) -> list[str]:
        """Return the modules around a module, innermost first, without the root."""
        found = []
        while name := self.parent(name) if name else "":
            found.append(name)
        return found

    def children(self, name: str) -> list[str]:
        """Return direct children in the order of execution as far as it is known, else in the order of definition."""
        return self._ordered[name]

    def _order(self, children: list[str]) -> list[str]:
        keyed, last = [], -1
        for child in children:
            called = self._first_call(child)
            last = last if called is None else called
            keyed.append((last, child))
        return [child for _, child in sorted(keyed, key=lambda pair: pair[0])]

    def _first_call(self, name: str) -> int | None:
        called = self.modules[name].called
        if called is not None:
            return called
        below = [first for child in self._children[name] if (first := self._first_call(child)) is not None]
        return min(below, default=None)

    def leaves(self, name: str) -> list[str]:
        """Return the modules below that hold no others; a module without children is its own leaf."""
        if name not in self._leaves:
            children = self.children(name)
            self._leaves[name] = [leaf for child in children for leaf in self.leaves(child)] if children else [name]
        return self._leaves[name]

    def tensor(self, name: str) -> TensorOutline:
        """Return a tensor by its full name."""
        module, _, own = name.rpartition(".")
        return self.modules[module].tensors[own]

    def find(self, tensor: str) -> tuple[str, str] | None:
        """Return (module, own name) of a tensor by its full name; None if there is no such tensor."""
        module, _, own = tensor.rpartition(".")
        return (module, own) if module in self.modules and own in self.modules[module].tensors else None


def full_name(module: str, tensor: str) -> str:
    """Return a tensor's name from the root, as in a checkpoint."""
    return f"{module}.{tensor}" if module else tensor
