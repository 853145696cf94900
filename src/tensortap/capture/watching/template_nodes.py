"""The structure of a value as nodes, against which later values are checked.

`native/templates.h` checks values in the same way.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import OrderedDict, UserDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from types import MemberDescriptorType
from typing import Any

import numpy as np

from tensortap.capture.watching.flatten import is_opened
from tensortap.core.arguments import OpaqueValue
from tensortap.frameworks.base import Framework

__all__ = ["SINGLE_TENSOR", "Node", "NodeBuilder", "collect"]

Node = tuple[Any, ...]
"""One of: (tensor,), (equal, value), (alike, type), (sequence, type, nodes), (mapping, type, nodes of keys, nodes),
(fields, type, names, nodes), (float, value)."""
_TENSOR, _EQUAL, _ALIKE, _SEQUENCE, _MAPPING, _FIELDS, _FLOAT = range(7)
SINGLE_TENSOR: Node = (_TENSOR,)
"""The node of a value that is one tensor."""

_DEEPEST = 8
_BY_TYPE = (bytes, bytearray, complex, range, slice)
"""Plain values of which a run keeps the type alone."""
_EXACT: tuple[Any, ...] = (object.__eq__, int.__eq__, str.__eq__)
"""How members of enumerations are compared, unless their class says otherwise."""
_BY_VALUE = (type, float, int, str, np.generic, Enum, OpaqueValue)
"""Plain values that a run keeps by more than their type, and that are compared in ways of their own."""


class NodeBuilder:
    """Builds the nodes of values. Where plain values are not recorded, only their types matter."""

    def __init__(self, framework: Framework, *, plain_values: bool) -> None:
        self._framework = framework
        self._plain_values = plain_values

    def node_of(self, value: Any, depth: int = 0) -> Node | None:
        """Return the node of a value; None if two values like it may open differently."""
        kind = type(value)
        framework = self._framework
        if kind in framework.plain_tensors:
            return SINGLE_TENSOR if depth == 0 else (_TENSOR,)
        if is_opened(value):
            return self._container_node(value, depth + 1) if depth < _DEEPEST else None
        if framework.is_tensor(value):
            return None
        if kind in _BY_TYPE or not self._plain_values:
            return _ALIKE, kind
        if value is None or kind in (bool, int, str):
            return _EQUAL, value
        if kind is float:
            return _FLOAT, value
        if isinstance(value, Enum) and kind.__eq__ in _EXACT:
            return _EQUAL, value
        if isinstance(value, _BY_VALUE):
            return None
        return (_EQUAL, value) if framework.opaque_value(value) is not None else (_ALIKE, kind)

    def _container_node(self, value: Any, depth: int) -> Node | None:
        """Return the node of a container at this depth; its parts are in the order of `flatten`."""
        kind = type(value)
        if isinstance(value, Mapping):
            if not _is_plain_mapping(kind) or not all(type(key) in (str, int) for key in value):
                return None
            nodes = self._nodes_of(value.values(), depth)
            return None if nodes is None else (_MAPPING, kind, [(_EQUAL, key) for key in value], nodes)
        if isinstance(value, (tuple, list)):
            nodes = self._nodes_of(value, depth) if _is_plain_sequence(kind) else None
            return None if nodes is None else (_SEQUENCE, kind, nodes)
        names = [field.name for field in dataclasses.fields(value)]
        if not _has_plain_fields(kind, names):
            return None
        nodes = self._nodes_of((getattr(value, name, None) for name in names), depth)
        return None if nodes is None else (_FIELDS, kind, names, nodes)

    def _nodes_of(self, parts: Iterable[Any], depth: int) -> list[Node] | None:
        nodes = []
        for part in parts:
            if (node := self.node_of(part, depth)) is None:
                return None
            nodes.append(node)
        return nodes


def collect(value: Any, node: Node, plain_tensors: Collection[type], found: Callable[[Any], None]) -> bool:
    """Pass the tensors of a value on, in the order in which they are opened; return whether it is as `node` says."""
    what = node[0]
    if what == _TENSOR:
        if type(value) not in plain_tensors:
            return False
        found(value)
        return True
    known = node[1]
    if what == _EQUAL:
        return value is known or (type(value) is type(known) and value == known)
    if what == _FLOAT:  # -0.0 equals 0.0, but is another value
        return value is known or (type(value) is float and value.hex() == known.hex())
    if type(value) is not known:
        return False
    if what == _ALIKE:
        return True
    nodes = node[2]
    if what == _FIELDS:
        parts, nodes = [getattr(value, name, None) for name in nodes], node[3]
    elif what == _MAPPING:
        if not _collect_all(list(value), nodes, plain_tensors, found):
            return False
        parts, nodes = list(value.values()), node[3]
    else:
        parts = value
    return _collect_all(parts, nodes, plain_tensors, found)


def _collect_all(
    parts: Sequence[Any], nodes: Sequence[Node], plain_tensors: Collection[type], found: Callable[[Any], None]
) -> bool:
    if len(parts) != len(nodes):
        return False
    for part, expected in zip(parts, nodes, strict=True):  # noqa: SIM110 - a generator takes longer
        if not collect(part, expected, plain_tensors, found):
            return False
    return True


def _is_plain_mapping(kind: type) -> bool:
    """Return whether a class of mappings is read as a dict is."""
    if issubclass(kind, dict):
        bases: tuple[Any, ...] = dict, OrderedDict
        readers = ["__iter__", "items", "values"]
    else:
        bases = (UserDict,)
        readers = ["__iter__", "__getitem__", "items", "values"]
    return all(getattr(kind, name) in [getattr(base, name) for base in bases] for name in readers)


def _is_plain_sequence(kind: type) -> bool:
    """Return whether a class of tuples or lists is read as these are. Its names, if it has any, belong to the class."""
    base: Any = tuple if issubclass(kind, tuple) else list
    own: Any = kind
    return own.__iter__ is base.__iter__ and own.__len__ is base.__len__ and type(getattr(kind, "_fields", ())) is tuple


def _has_plain_fields(kind: Any, names: Sequence[str]) -> bool:
    """Return whether the fields of a dataclass are values of each object, so that no code runs when they are read."""
    if kind.__getattribute__ is not object.__getattribute__ or hasattr(kind, "__getattr__"):
        return False
    found = [inspect.getattr_static(kind, name, None) for name in names]
    return all(isinstance(each, MemberDescriptorType) or not hasattr(type(each), "__get__") for each in found)
