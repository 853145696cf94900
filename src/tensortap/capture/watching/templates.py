"""Opens the arguments and outputs of a module by what they were in its call before.

A module is called with the same structure in every step: the same keywords, the same switches, tensors in the same
places. Checking that takes a tenth of the time of opening anew, and all that was derived from the structure, as paths
and slots, can be used again. A value that differs is opened as if there had been no call before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from tensortap.capture.watching.flatten import Opened, is_opened, open_arguments, open_value
from tensortap.core.arguments import OpaqueValue
from tensortap.core.interrupts import raise_interrupt
from tensortap.frameworks.base import Framework

__all__ = ["Template", "TemplateOpener", "one_value"]

_MOST_MISSES = 64
"""Values that differ from their template before a module is taken for one whose calls never repeat."""
_MOST_CALLS = 256
"""Calls of one template for which anything is kept: a step that never ends must not grow for ever."""

Node = tuple[Any, ...]
"""One of: (tensor,), (equal, value), (alike, type), (sequence, type, nodes), (mapping, type, keys, nodes)."""
_TENSOR, _EQUAL, _ALIKE, _SEQUENCE, _MAPPING = range(5)
_SINGLE: Node = (_TENSOR,)


class Template:
    """The structure of a value, and what its readers keep with it."""

    __slots__ = ("_by_call", "_node", "arguments", "closed", "paths", "plain", "text")

    def __init__(self, node: Node, opened: Opened) -> None:
        self._node = node
        self.paths = [path for path, _ in opened.tensors]
        self.closed = opened.closed
        self.plain = opened.plain
        self.arguments: Mapping[str, Any] | None = None
        """The plain values in the form in which a run keeps them; None until they are asked for."""
        self.text = ""
        """The same as text."""
        self._by_call: dict[Any, Any] = {}

    def of_call(self, call: Any, make: Callable[[Sequence[str]], Any]) -> Any:
        """Return what is kept for a call; `make` makes it from the paths."""
        if (found := self._by_call.get(call)) is None:
            if len(self._by_call) == _MOST_CALLS:
                self._by_call.clear()
            found = self._by_call[call] = make(self.paths)
        return found

    def tensors(self, value: Any, plain_tensors: Collection[type]) -> list[Any] | None:
        """Return the tensors of a value in the order of `paths`; None if its structure is another one."""
        if self._node is _SINGLE:
            return [value] if type(value) in plain_tensors else None
        found: list[Any] = []
        return found if _collect(value, self._node, plain_tensors, found.append) else None

    def opened(self, value: Any, plain_tensors: Collection[type]) -> Opened | None:
        """Open a value; None if its structure is another one."""
        if (tensors := self.tensors(value, plain_tensors)) is None:
            return None
        return Opened(list(zip(self.paths, tensors, strict=True)), self.closed, self.plain, self)


class TemplateOpener:
    """Opens what one module gets, or what it returns."""

    __slots__ = ("_framework", "_misses", "_template")

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._template: Template | None = None
        self._misses = 0

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Opened:
        """Open the arguments of a call."""
        plain_tensors = self._framework.plain_tensors
        value = one_value(args, kwargs, plain_tensors)
        if self._template is not None and (found := self._template.opened(value, plain_tensors)) is not None:
            return found
        return self._learned(value, open_arguments(args, kwargs, self._framework.is_tensor))

    def output(self, value: Any) -> Opened:
        """Open an output."""
        plain_tensors = self._framework.plain_tensors
        if self._template is not None and (found := self._template.opened(value, plain_tensors)) is not None:
            return found
        return self._learned(value, open_value(value, self._framework.is_tensor))

    def _learned(self, value: Any, opened: Opened) -> Opened:
        if self._misses < _MOST_MISSES:
            self._misses += 1
            try:
                node = _node_of(value, self._framework, depth=0)
            except Exception as error:  # the value's own code runs here
                raise_interrupt(error)
                node = None
            self._template = opened.template = None if node is None else Template(node, opened)
        return opened


def one_value(args: tuple[Any, ...], kwargs: Mapping[str, Any], plain_tensors: Collection[type]) -> Any:
    """Return arguments as one value: most calls have a single tensor."""
    return args[0] if len(args) == 1 and not kwargs and type(args[0]) in plain_tensors else (args, kwargs)


def _collect(value: Any, node: Node, plain_tensors: Collection[type], found: Callable[[Any], None]) -> bool:
    """Pass the tensors of a value on, in the order in which they are opened; return whether it is as `node` says."""
    what = node[0]
    if what == _TENSOR:
        if type(value) not in plain_tensors:
            return False
        found(value)
        return True
    if what == _EQUAL:
        known = node[1]
        return value is known or (type(value) is type(known) and value == known)
    if type(value) is not node[1]:
        return False
    if what == _ALIKE:
        return True
    if what == _MAPPING:
        if list(value) != node[2]:
            return False
        value, nodes = value.values(), node[3]
    elif len(value) != len(nodes := node[2]):
        return False
    for part, expected in zip(value, nodes, strict=True):  # noqa: SIM110 - a generator takes longer
        if not _collect(part, expected, plain_tensors, found):
            return False
    return True


def _node_of(value: Any, framework: Framework, depth: int) -> Node | None:
    """Return the node of a value; None if two values like it may open differently."""
    kind = type(value)
    if kind in framework.plain_tensors:
        return _SINGLE if depth == 0 else (_TENSOR,)
    if value is None or kind in (bool, int, str):
        return _EQUAL, value
    if kind is float:
        return (_EQUAL, value) if value else None  # -0.0 equals 0.0, but is another value
    if kind in (tuple, list):
        parts = [_node_of(part, framework, depth + 1) for part in value] if depth < _DEEPEST else [None]
        return None if None in parts else (_SEQUENCE, kind, parts)
    if isinstance(value, dict) and depth < _DEEPEST and _is_plain_dict(kind) and all(type(key) is str for key in value):
        parts = [_node_of(part, framework, depth + 1) for part in value.values()]
        return None if None in parts else (_MAPPING, kind, list(value), parts)
    if is_opened(value) or isinstance(value, _BY_VALUE) or framework.is_tensor(value):
        return None
    return (_EQUAL, value) if framework.opaque_value(value) is not None else (_ALIKE, kind)


def _is_plain_dict(kind: type) -> bool:
    """Return whether a subclass of dict is read as dict is."""
    return all(
        getattr(kind, name) in (getattr(dict, name), getattr(OrderedDict, name))
        for name in ("__iter__", "items", "values")
    )


_DEEPEST = 8
_BY_VALUE = (bytes, bytearray, complex, type, range, slice, float, int, str, np.generic, Enum, OpaqueValue)
"""Plain values that a run keeps by more than their type, and that are compared in ways of their own."""
