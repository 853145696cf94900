"""What mapping needs to know of a model: its modules in the order they were defined, and the tensors that each owns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Module", "Outline", "Own", "full_name"]


@dataclass(frozen=True, slots=True)
class Own:
    """A parameter or buffer of a module."""

    shape: tuple[int, ...]
    kind: str = "param"
    """param | buffer"""
    tied: str = ""
    """The full name under which the same tensor was met first."""


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """A module at its place in the tree."""

    name: str
    cls: str
    tensors: dict[str, Own] = field(default_factory=dict)
    called: int | None = None
    """When it was first called, in the order of execution; None if that is not known, or never."""
    base: str = ""
    """The framework's own class that it inherits from, if it is not that itself."""

    @property
    def classes(self) -> tuple[str, ...]:
        """What rules may call it."""
        return (self.cls, self.base) if self.base else (self.cls,)


class Outline:
    """All modules of a model by name. What hangs below what follows from the names."""

    def __init__(self, framework: str, modules: Iterable[Module]) -> None:
        self.framework = framework
        self.modules = {module.name: module for module in modules}
        self.modules.setdefault("", Module("", ""))
        self._children: dict[str, list[str]] = {name: [] for name in self.modules}
        for name in self.modules:
            if name:
                self._children[self.parent(name)].append(name)
        self._ordered = {name: self._order(children) for name, children in self._children.items()}
        self._leaves: dict[str, list[str]] = {}

    def parent(self, name: str) -> str:
        """The nearest module above; one in between may not have been recorded."""
        while name:
            name = name.rpartition(".")[0]
            if name in self.modules:
                break
        return name

    def above(self, name: str) -> list[str]:
        """The modules around a module, the innermost first; the root is not among them."""
        found = []
        while name := self.parent(name) if name else "":
            found.append(name)
        return found

    def children(self, name: str) -> list[str]:
        """Direct children in the order in which they ran, as far as that is known; else as they were defined."""
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
        """The modules below that hold no others; a module without children is its own."""
        if name not in self._leaves:
            children = self.children(name)
            self._leaves[name] = [leaf for child in children for leaf in self.leaves(child)] if children else [name]
        return self._leaves[name]

    def tensor(self, name: str) -> Own:
        """A tensor by its full name."""
        module, _, own = name.rpartition(".")
        return self.modules[module].tensors[own]

    def find(self, tensor: str) -> tuple[str, str] | None:
        """(module, own name) of a tensor by its full name."""
        module, _, own = tensor.rpartition(".")
        return (module, own) if module in self.modules and own in self.modules[module].tensors else None


def full_name(module: str, tensor: str) -> str:
    """A tensor's name from the root, as a checkpoint has it."""
    return f"{module}.{tensor}" if module else tensor
