"""Functions that refer to a module, made to refer to a copy of it.

A deep copy of a module shares its plain functions. If a program has replaced a module's `forward` by a function that
calls the former one, the copy's `forward` would call the original module.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

__all__ = ["rebind_functions"]


def rebind_functions(pairs: Iterable[tuple[Any, Any]], modules: Iterable[Any]) -> None:
    """Make the functions among the attributes of copied modules refer to copies.

    pairs: each object that was copied, and its copy: modules, parameters, buffers.
    modules: the copied modules.

    >>> rebind_functions(zip(model.modules(), twin.modules()), twin.modules())
    """
    pairs = list(pairs)
    rebinding = _Rebinding({id(original): copy for original, copy in pairs})
    for module in modules:
        attributes = vars(module)
        for name, value in list(attributes.items()):
            if isinstance(value, (FunctionType, MethodType, partial)):
                attributes[name] = rebinding.of(value)


class _Rebinding:
    """Copies of objects, by the id of the original."""

    def __init__(self, copies: dict[int, Any]) -> None:
        self._copies = copies
        self._held: list[Any] = []
        """Functions whose ids are in use."""

    def of(self, value: Any) -> Any:
        """Return the copy of an object, or of a function that refers to one; anything else as it is."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, partial):
            keywords = {name: self.of(each) for name, each in value.keywords.items()}
            return partial(self.of(value.func), *map(self.of, value.args), **keywords)
        if isinstance(value, FunctionType):
            return self._function(value)
        if type(value) in (list, tuple) and any(id(each) in self._copies for each in value):
            return type(value)(map(self.of, value))
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        if function.__closure__ is None and not function.__defaults__ and not function.__kwdefaults__:
            return function
        cells = tuple(CellType() for _ in function.__closure__ or ())
        made = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
        self._copies[id(function)] = made  # before its cells are filled: it may refer to itself
        self._held.append(function)
        made.__dict__.update(function.__dict__)
        made.__defaults__ = None if function.__defaults__ is None else tuple(map(self.of, function.__defaults__))
        if function.__kwdefaults__:
            made.__kwdefaults__ = {name: self.of(each) for name, each in function.__kwdefaults__.items()}
        for cell, own in zip(cells, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # a cell that is still empty
                cell.cell_contents = self.of(own.cell_contents)
        return made
