"""Plain arguments: what a module was called with beside tensors, such as `is_causal=True`. Written for JSON, read back.

What JSON has stands for itself; anything else is an object whose first key says what it is:

    null, true, 3, 0.5, "mean"          as they are
    [...]                               a list
    {"tuple": [...]}                    a tuple
    {"dict": [[key, value], ...]}       a dict
    {"float": "nan"}                    also "inf" and "-inf"
    {"numpy": ["float32", 0.5]}         a scalar of NumPy
    {"dtype": "float16"}                a framework's dtype; {"device": "cuda:0"} likewise, {"enum": "Mode.FULL"} too
    {"object": "Cache"}                 of all else only the name of its type; "note" says what of it was too much
    {"left_out": "7 more"}              under the path "…", where a call has too many values

Nothing of a user's own is called on the way: objects are known by their type alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "ABSENT",
    "LEFT_OUT",
    "TENSOR",
    "ArgumentDifference",
    "OpaqueValue",
    "all_in_words",
    "as_json",
    "in_words",
    "read",
    "written",
]

LEFT_OUT = "…"
"""The path under which stands how many values were too many."""

_LONGEST = 200
"""Letters of a text, or of a path."""
_WIDEST = 256
"""Bits of a whole number."""
_MOST_ITEMS = 64
"""Of one list, tuple or dict."""
_DEEPEST = 4
_MOST_VALUES = 256
"""Of one call."""
_MOST_WORDS = 60
_NUMPY = {np.dtype(code).type: np.dtype(code).name for code in "?bhilqBHILQefd"}


@dataclass(frozen=True, slots=True, repr=False)
class OpaqueValue:
    """What stands for a value that is not kept itself. `repr` is what people read."""

    kind: str
    """dtype | device | enum | object | left_out; in comparisons also tensor and absent"""
    text: str = ""
    """Its name, or that of its type."""
    note: str = ""

    def __repr__(self) -> str:
        if self.kind == "object":
            article = "an" if self.text[:1].lower() in {*"aeiou"} else "a"
            words = f"{article} {self.text} object" + (f" ({self.note})" if self.note else "")
        else:
            words = self.text
        return words if words.isprintable() else repr(words)[1:-1]


TENSOR = OpaqueValue("tensor", "a tensor")
ABSENT = OpaqueValue("absent", "not given")


class ArgumentDifference(NamedTuple):
    """A plain argument in which two calls differ; `TENSOR` or `ABSENT` where a side has no plain one."""

    path: str
    reference: Any
    candidate: Any


def in_words(value: Any) -> str:
    """A value as one would write it, if that is short.

    >>> in_words(True), in_words((7, OpaqueValue("object", "Cache"))), in_words("x" * 100)[-20:]
    ('True', '(7, a Cache object)', 'xxxxxxxxxxxxxxxxxxx…')
    """
    text = repr(value)
    return text if len(text) <= _MOST_WORDS else f"{text[: _MOST_WORDS - 1]}…"


def all_in_words(arguments: Mapping[str, Any]) -> str:
    """
    >>> all_in_words({"1": None, "scale": 0.125})
    '1=None, scale=0.125'
    """
    return ", ".join(f"{path}={in_words(value)}" for path, value in arguments.items())


def written(plain: Iterable[tuple[str, Any]], named: Callable[[Any], OpaqueValue | None]) -> dict[str, Any]:
    """The plain values of a call, by path, as JSON has them. `named` tells a framework's dtypes and devices."""
    pen = _Pen(named)
    found: dict[str, Any] = {}
    too_many = 0
    for path, value in plain:
        if pen.left <= 0 or path in found or len(path) > _LONGEST:
            too_many += 1
        else:
            found[path] = pen.of(value, 0)
    if too_many:
        found[LEFT_OUT] = {"left_out": f"{too_many} more"}
    return found


def as_json(value: Any) -> Any:
    """One value as `written` writes it; also one that was read."""
    return _Pen(lambda _: None).of(value, 0)


def read(found: Mapping[str, Any]) -> dict[str, Any]:
    """What `written` wrote, by path: Python's own values, and an `OpaqueValue` where that is all there is.

    >>> read(written([("1", (None, 0.5)), ("past", object())], lambda _: None))
    {'1': (None, 0.5), 'past': an object object}
    """
    return {path: _value(part) for path, part in found.items()}


_AS_THEY_ARE = frozenset({type(None), bool})


class _Pen:
    """Writes values, up to so many."""

    def __init__(self, named: Callable[[Any], OpaqueValue | None]) -> None:
        self._named = named
        self.left = _MOST_VALUES

    def of(self, value: Any, depth: int) -> Any:
        self.left -= 1
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is int and value.bit_length() <= _WIDEST:
            return value
        if kind is str:
            return value if len(value) <= _LONGEST else _object(kind, f"{len(value)} letters: {value[:_LONGEST]!r}")
        if kind in _NUMPY:
            return {"numpy": [_NUMPY[kind], self.of(value.item(), depth)]}
        if (told := value if kind is OpaqueValue else self._named(value)) is not None:
            return {told.kind: told.text} | ({"note": told.note} if told.note else {})
        # By the type, and not by isinstance: that asks the value itself what it is.
        if issubclass(kind, Enum):
            return {"enum": f"{_name(kind)}.{object.__getattribute__(value, '_name_')}"[:_LONGEST]}
        for container, count in _CONTAINERS.items():
            if issubclass(kind, container) and not hasattr(kind, "_fields"):
                return self._container(value, container, count(value), depth)
        return _object(kind)

    def _container(self, value: Any, container: type, count: int, depth: int) -> Any:
        if count > min(_MOST_ITEMS, self.left) or depth >= _DEEPEST:
            return _object(container, f"{count} items")
        if container is dict:
            return {"dict": [[self.of(key, depth + 1), self.of(part, depth + 1)] for key, part in dict.items(value)]}
        parts: Iterator[Any] = container.__iter__(value)  # type: ignore[attr-defined]  # the one that is not its own
        items = [self.of(part, depth + 1) for part in parts]
        return items if container is list else {"tuple": items}


_CONTAINERS: dict[type, Callable[[Any], int]] = {list: list.__len__, tuple: tuple.__len__, dict: dict.__len__}


def _object(kind: type, note: str = "") -> dict[str, str]:
    return {"object": _name(kind)} | ({"note": note} if note else {})


def _name(kind: type) -> str:
    return str(kind.__qualname__)[:_LONGEST]


def _value(part: Any) -> Any:
    if isinstance(part, list):
        return [_value(each) for each in part]
    if not isinstance(part, dict):
        return part
    kind: str = next(iter(part), "object")
    inner: Any = part.get(kind, "unknown")
    try:
        if kind == "tuple":
            return tuple(_value(each) for each in inner)
        if kind == "dict":
            return {_value(key): _value(each) for key, each in inner}
        if kind == "float":
            return float(inner)
        if kind == "numpy" and inner[0] in _NUMPY.values():
            return _scalar(np.dtype(inner[0]), _value(inner[1]))
    except (TypeError, ValueError, OverflowError, LookupError):  # written by nobody that we know
        return OpaqueValue("object", "unknown")
    known = ("dtype", "device", "enum", "object", "left_out")
    return (
        OpaqueValue(kind, str(inner), str(part.get("note", ""))) if kind in known else OpaqueValue("object", str(kind))
    )


def _scalar(dtype: np.dtype[Any], value: Any) -> Any:
    """A NumPy scalar. Raise OverflowError if the value does not fit: NumPy before 2 wraps it around."""
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise OverflowError(f"{value} does not fit into {dtype}")
    return dtype.type(value)
