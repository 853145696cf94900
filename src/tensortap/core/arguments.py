"""Plain arguments: those arguments of a call that are not tensors, such as `is_causal=True`, to and from JSON.

JSON's own values stand for themselves. Anything else is an object whose first key names its kind:

    null, true, 3, 0.5, "mean"          as they are
    [...]                               a list
    {"tuple": [...]}                    a tuple
    {"dict": [[key, value], ...]}       a dict
    {"float": "nan"}                    also "inf" and "-inf"
    {"numpy": ["float32", 0.5]}         a scalar of NumPy
    {"dtype": "float16"}                a framework's dtype; {"device": "cuda:0"} likewise, {"enum": "Mode.FULL"} too
    {"object": "Cache"}                 the type's name of anything else; "note" says why more was not kept
    {"left_out": "7 more"}              under the path "…", where a call has too many values

No code of the user's objects runs: they are classified by their type alone.
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
"""The path under which the number of omitted values is kept."""

_LONGEST = 200
"""Maximum number of characters of a string or of a path."""
_WIDEST = 256
"""Maximum number of bits of an integer."""
_MOST_ITEMS = 64
"""Maximum length of one list, tuple or dict."""
_DEEPEST = 4
_MOST_VALUES = 256
"""Maximum number of values of one call."""
_MOST_WORDS = 60
_NUMPY = {np.dtype(code).type: np.dtype(code).name for code in "?bhilqBHILQefd"}


@dataclass(frozen=True, slots=True, repr=False)
class OpaqueValue:
    """Stand-in for a value that is not kept itself. `repr` is its form for people."""

    kind: str
    """dtype | device | enum | object | left_out; in comparisons also tensor and absent"""
    text: str = ""
    """The value's name, or that of its type."""
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
    """A plain argument in which two calls differ; a side without a plain one has `TENSOR` or `ABSENT`."""

    path: str
    reference: Any
    candidate: Any


def in_words(value: Any) -> str:
    """Return a value as its repr, shortened to one line.

    A float whose last bits alone separate it from a number of few digits is written as that number.

    >>> in_words(True), in_words((7, OpaqueValue("object", "Cache"))), in_words("x" * 100)[-20:]
    ('True', '(7, a Cache object)', 'xxxxxxxxxxxxxxxxxxx…')
    >>> in_words(1 - 0.9997), in_words(0.1 + 1e-8)
    ('0.0003', '0.10000001')
    """
    text = repr(value)
    if isinstance(value, float) and math.isclose(short := float(f"{value:.9g}"), value, rel_tol=1e-12):
        text = repr(short)
    return text if len(text) <= _MOST_WORDS else f"{text[: _MOST_WORDS - 1]}…"


def all_in_words(arguments: Mapping[str, Any]) -> str:
    """
    >>> all_in_words({"1": None, "scale": 0.125})
    '1=None, scale=0.125'
    """
    return ", ".join(f"{path}={in_words(value)}" for path, value in arguments.items())


def written(plain: Iterable[tuple[str, Any]], named: Callable[[Any], OpaqueValue | None]) -> dict[str, Any]:
    """Return the plain values of a call by path, for JSON. `named` recognises a framework's dtypes and devices."""
    encoder = _Encoder(named)
    found: dict[str, Any] = {}
    too_many = 0
    for path, value in plain:
        if encoder.left <= 0 or path in found or len(path) > _LONGEST:
            too_many += 1
        else:
            found[path] = encoder.encode(value, 0)
    if too_many:
        found[LEFT_OUT] = {"left_out": f"{too_many} more"}
    return found


def as_json(value: Any) -> Any:
    """Return one value in the form of `written`; the value may also come from `read`."""
    return _Encoder(lambda _: None).encode(value, 0)


def read(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in the output of `written`, by path: Python's own, and an `OpaqueValue` for each that was not
    kept.

    >>> read(written([("1", (None, 0.5)), ("past", object())], lambda _: None))
    {'1': (None, 0.5), 'past': an object object}
    """
    return {path: _value(part) for path, part in found.items()}


_UNCHANGED = frozenset({type(None), bool})


class _Encoder:
    """Encodes the values of one call, up to a maximum number."""

    def __init__(self, named: Callable[[Any], OpaqueValue | None]) -> None:
        self._named = named
        self.left = _MOST_VALUES

    def encode(self, value: Any, depth: int) -> Any:
        self.left -= 1
        kind = type(value)
        if kind in _UNCHANGED:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is int and value.bit_length() <= _WIDEST:
            return value
        if kind is str:
            return value if len(value) <= _LONGEST else _object(kind, f"{len(value)} characters: {value[:_LONGEST]!r}")
        if kind in _NUMPY:
            return {"numpy": [_NUMPY[kind], self.encode(value.item(), depth)]}
        if (opaque := value if kind is OpaqueValue else self._named(value)) is not None:
            return {opaque.kind: opaque.text} | ({"note": opaque.note} if opaque.note else {})
        # By the type, not by isinstance, which asks the value for its __class__.
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
            return {
                "dict": [[self.encode(key, depth + 1), self.encode(part, depth + 1)] for key, part in dict.items(value)]
            }
        # The built-in iterator: a subclass may define its own.
        parts: Iterator[Any] = container.__iter__(value)  # type: ignore[attr-defined]
        items = [self.encode(part, depth + 1) for part in parts]
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
    except (TypeError, ValueError, OverflowError, LookupError):  # not written by this module
        return OpaqueValue("object", "unknown")
    known = ("dtype", "device", "enum", "object", "left_out")
    return (
        OpaqueValue(kind, str(inner), str(part.get("note", ""))) if kind in known else OpaqueValue("object", str(kind))
    )


def _scalar(dtype: np.dtype[Any], value: Any) -> Any:
    """Return a NumPy scalar. Raise OverflowError if the value does not fit: NumPy before 2 wraps it around."""
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise OverflowError(f"{value} does not fit into {dtype}")
    return dtype.type(value)
