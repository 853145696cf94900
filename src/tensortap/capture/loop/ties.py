"""The tensors of a model by name: all names of shared tensors, frozen parameters, and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tensortap.capture.modules.tree import Tree
from tensortap.core.interrupts import suppress_errors
from tensortap.frameworks.base import Framework

__all__ = ["buffer_names", "frozen_parameters", "tensor_names", "ties"]


def tensor_names(framework: Framework, tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield each parameter and buffer of a model with its full name, also under the names of shared modules."""
    aliases: dict[str, list[str]] = {}
    for alias in tree.aliases:
        aliases.setdefault(alias.first, []).append(alias.name)
    later = []
    for site in tree.sites:
        for name, tensor in (*framework.parameters(site.owner), *framework.buffers(site.owner)):
            yield _joined(site.name, name), tensor
            later += [(_joined(other, name), tensor) for other in _names(site.name, aliases)]
    yield from later


def frozen_parameters(framework: Framework, tree: Tree) -> list[str]:
    """Return the names of the parameters that require no gradient."""
    return [
        _joined(site.name, name)
        for site in tree.sites
        for name, tensor in framework.parameters(site.owner)
        if not framework.requires_gradient(tensor)
    ]


def buffer_names(framework: Framework, tree: Tree) -> list[str]:
    """Return the names of all buffers."""
    return [_joined(site.name, name) for site in tree.sites for name, _ in framework.buffers(site.owner)]


def _names(module: str, aliases: dict[str, list[str]]) -> Iterator[str]:
    """Yield the other names of a module: its own, and those below another name of a module around it."""
    above, below = module, ""
    while True:
        for other in aliases.get(above, ()):
            yield _joined(other, below) if below else other
        if not above:
            return
        above, _, last = above.rpartition(".")
        below = f"{last}.{below}" if below else last


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def ties(framework: Framework, tensors: Sequence[tuple[str, Any]]) -> dict[str, str]:
    """Return the first name of each tensor that has several, by its other names.

    Two tensors are one if they are one object, or if they share their memory in the same shape.
    """
    first: dict[Any, str] = {}
    found = {}
    for name, tensor in tensors:
        known = first.setdefault(_identity(framework, tensor), name)
        if known != name:
            found[name] = known
    return found


def _identity(framework: Framework, tensor: Any) -> Any:
    if (address := getattr(framework, "address", None)) is not None:
        with suppress_errors():  # a tensor without memory, as a meta tensor
            if where := address(tensor):
                return where, tuple(tensor.shape)
    return id(tensor)
