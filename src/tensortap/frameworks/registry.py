"""The registry of frameworks: which framework a model was built with, found without importing any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from tensortap.errors import UsageError
from tensortap.frameworks.base import Framework, Remove

__all__ = ["ENTRY_POINTS", "framework_of", "network_of", "register", "registered_frameworks"]

ENTRY_POINTS = "tensortap.frameworks"
"""Entry point group of other packages. A name is the root package of the model classes; the object is the framework's
class."""


@dataclass(frozen=True, slots=True)
class _RegisteredFramework:
    root: str
    framework: str | Callable[[], Framework]
    models: str

    def load(self) -> Framework:
        if not isinstance(self.framework, str):
            return self.framework()
        module, _, name = self.framework.partition(":")
        made: Framework = getattr(import_module(module), name)()
        return made


_entries: list[_RegisteredFramework] = []


def register(root: str, framework: str | Callable[[], Framework], *, models: str) -> Remove:
    """Add a framework, and return a function that removes it again.

    root: the root package of the framework's module classes. A model is recognised by the packages of its classes, so
        the framework is imported only when a model of it is in use.
    framework: returns the framework, as its class does; or where to import that from, as "package.module:name".
    models: the accepted types, for error messages.

    >>> register("torch", "tensortap.frameworks.torch.framework:Torch", models="a torch.nn.Module")
    """
    entry = _RegisteredFramework(root, framework, models)
    _entries.append(entry)

    def remove() -> None:
        if entry in _entries:
            _entries.remove(entry)

    return remove


def registered_frameworks() -> dict[str, Callable[[], Framework]]:
    """Return a function for each registered root package that loads its framework."""
    return {entry.root: entry.load for entry in _entries}


def framework_of(model: Any) -> Framework:
    """Return the framework that a model was built with.

    Raise UsageError if the argument is not a model, and name the accepted types.

    >>> framework_of(torch.nn.Linear(2, 2)).name
    'torch'
    """
    for framework in _candidates(model):
        if framework.is_module(model):
            return framework
    accepted = " or ".join(dict.fromkeys(entry.models for entry in _entries))
    raise UsageError(
        f"a {type(model).__module__}.{type(model).__qualname__} is not a model: give {accepted}; "
        "not the model's class, optimizer or trainer"
    )


def network_of(model: Any) -> Any:
    """Return the module to tap: the network of a `paddle.Model`, and every other argument unchanged."""
    for framework in _candidates(model):
        if (network := framework.network(model)) is not model:
            return network
    return model


def _candidates(model: Any) -> list[Framework]:
    """Return the frameworks whose packages define a class of the model."""
    roots = {str(cls.__module__).partition(".")[0] for cls in type(model).__mro__}
    known = [entry.load() for entry in _entries if entry.root in roots]
    return known or [found.load()() for found in entry_points(group=ENTRY_POINTS) if found.name in roots]
