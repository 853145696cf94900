"""Rebuilds the arguments of a recorded call from the paths of its tensors and plain arguments.

Arguments that the run did not keep come from the user, or from the defaults of the module's forward, and are reported.
Containers with tensors in them become tuples and dicts, whatever their type was.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensortap.core.arguments import LEFT_OUT, OpaqueValue, in_words
from tensortap.errors import UsageError

__all__ = ["CallArguments", "Slot", "build_arguments", "change_device", "split_path"]


@dataclass(frozen=True)
class Slot:
    """A position in the arguments that a recorded tensor fills."""

    path: str


@dataclass(frozen=True)
class _Kept:
    """A plain argument of the run, as a leaf of the tree of paths."""

    value: Any


@dataclass
class CallArguments:
    """Positional and keyword arguments, with a Slot for each tensor and an OpaqueValue for a dtype or a device."""

    positional: list[Any] = field(default_factory=list)
    keywords: dict[str, Any] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    """Arguments that the run did not keep, each with the value used instead."""
    dropped: list[str] = field(default_factory=list)
    """Arguments that the run kept but the forward does not take."""

    def fill(
        self, tensor: Callable[[str], Any], named: Callable[[OpaqueValue], Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with tensors in the slots; `named` makes dtypes and devices."""

        def value(slot: Slot | OpaqueValue) -> Any:
            return tensor(slot.path) if isinstance(slot, Slot) else named(slot)

        return [_fill_value(each, value) for each in self.positional], {
            name: _fill_value(each, value) for name, each in self.keywords.items()
        }

    def as_code(self, variable: Callable[[str], str], opaque: Callable[[OpaqueValue], str]) -> str:
        """Return the arguments as source code, with variables in the slots. `opaque` writes dtypes and devices."""

        def one(value: Any) -> str:
            return _value_code(value, lambda each: variable(each.path) if isinstance(each, Slot) else opaque(each))

        return ", ".join(
            [one(value) for value in self.positional]
            + [_keyword_code(name, one(value)) for name, value in self.keywords.items()]
        )

    @property
    def plain(self) -> list[str]:
        """The arguments without a tensor, in words."""
        every = [*((str(at), value) for at, value in enumerate(self.positional)), *self.keywords.items()]
        return [f"{name}={in_words(value)}" for name, value in every if not _has_slot(value)]


def build_arguments(
    paths: Iterable[str],
    kept: Mapping[str, Any] | None,
    forward: Callable[..., Any],
    given: Mapping[str, Any],
    name: str,
) -> CallArguments:
    """Return the arguments for a call of `forward`.

    kept: the plain arguments of the run by path; None if it did not record any.
    given: the user's arguments by name, which replace those of the run.
    name: the module's name, for messages.
    """
    tree: dict[str, Any] = {}
    for path in paths:
        _put(tree, split_path(path), Slot(path))
    found, missing = CallArguments(), dict[str, str]()
    for path, value in (kept or {}).items():
        parts = split_path(path)
        if _is_restorable(value):
            _put(tree, parts, _Kept(value))
        elif len(parts) > 1 and parts[0] in tree:  # inside a container with tensors
            _put(tree, parts, _Kept(None))
            found.assumed.append(f"{path} = None (it was {value!r})")
        else:
            missing[parts[0]] = "too large to keep" if path == LEFT_OUT else repr(value)
    positions = {int(part): node for part, node in tree.items() if part.isdecimal()}
    count = max((int(part) for part in (*tree, *missing) if part.isdecimal()), default=-1) + 1
    found.positional = [_build_value(positions[at]) if at in positions else _HOLE for at in range(count)]
    found.keywords = {part: _build_value(node) for part, node in tree.items() if not part.isdecimal()}
    _Completion(found, _parameters(forward), dict(given), kept is None, missing, name).run()
    return found


def change_device(kept: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return the plain arguments with every device replaced."""

    def change(value: OpaqueValue) -> OpaqueValue:
        return OpaqueValue("device", device) if value.kind == "device" else value

    return {path: _fill_value(value, change) for path, value in kept.items()}


def split_path(path: str) -> list[str]:
    """Split a path at its dots; a dot after a backslash belongs to a name.

    >>> split_path("past.0.k"), split_path("a\\\\.b")
    (['past', '0', 'k'], ['a.b'])
    """
    return [part.replace("\\.", ".") for part in re.split(r"(?<!\\)\.", path)]


_HOLE = object()


@dataclass
class _Completion:
    """Replaces kept arguments by given ones, and fills in those that neither has."""

    found: CallArguments
    parameters: list[inspect.Parameter]
    given: dict[str, Any]
    unknown: bool
    """Whether the run recorded no plain arguments at all."""
    missing: dict[str, str]
    """Position or keyword of an argument that the run could not keep → its description."""
    name: str

    def run(self) -> None:
        kinds = {parameter.kind for parameter in self.parameters}
        listed = [p for p in self.parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = [p for p in self.parameters if p.kind is p.KEYWORD_ONLY]
        if self.parameters:
            most = None if inspect.Parameter.VAR_POSITIONAL in kinds else len(listed)
            any_name = inspect.Parameter.VAR_KEYWORD in kinds
            self._drop_extra(most, None if any_name else {p.name for p in (*listed, *by_name)})
        self._complete_positional(listed)
        for parameter in [*listed[len(self.found.positional) :], *by_name]:
            if parameter.name in self.found.keywords:
                self._replace(self.found.keywords, parameter.name, parameter.name)
                continue
            is_given = parameter.name in self.given
            value = self._value_of(parameter, self.missing.pop(parameter.name, None))
            if is_given:
                self.found.keywords[parameter.name] = value
        if inspect.Parameter.VAR_KEYWORD in kinds or not self.parameters:
            for each in list(self.given):
                self.missing.pop(each, None)
                self._replace(self.found.keywords, each, each)
        self.found.assumed += [f"no {each} (it was {was})" for each, was in self.missing.items()]
        if self.given:
            known = ", ".join(p.name for p in self.parameters) or "unknown ones"
            raise UsageError(f"{self.name} takes no argument {next(iter(self.given))}; it takes {known}")

    def _drop_extra(self, most: int | None, names: set[str] | None) -> None:
        """Drop arguments that another implementation does not take."""
        found = self.found
        while most is not None and len(found.positional) > most and not _has_slot(found.positional[-1]):
            value = found.positional.pop()
            if self.missing.pop(str(len(found.positional)), None) is None:
                found.dropped.append(f"{len(found.positional)}={in_words(value)}")
        for each in [each for each in found.keywords if names is not None and each not in names]:
            if not _has_slot(found.keywords[each]):
                found.dropped.append(f"{each}={in_words(found.keywords.pop(each))}")

    def _complete_positional(self, listed: list[inspect.Parameter]) -> None:
        found = self.found
        for at, value in enumerate(found.positional):
            parameter = listed[at] if at < len(listed) else None
            if value is not _HOLE:
                if parameter is not None:
                    self._replace(found.positional, at, parameter.name)
                continue
            missing = self.missing.pop(str(at), None)
            found.positional[at] = self._value_of(parameter, missing) if parameter is not None else None
            if parameter is None:
                found.assumed.append(f"argument {at} = None" + (f" (it was {missing})" if missing else ""))

    def _replace(self, where: Any, at: Any, name: str) -> None:
        """Replace a kept argument by a given one; raise UsageError if it is a tensor."""
        if name not in self.given:
            return
        kept = where[at] if isinstance(where, list) else where.get(at)
        if _has_slot(kept):
            raise UsageError(f"{self.name}: argument {name} is a tensor that the run has; it cannot be given")
        value = self.given.pop(name)
        # On a command line, a dtype can only be given by name.
        where[at] = OpaqueValue(kept.kind, value) if isinstance(kept, OpaqueValue) and isinstance(value, str) else value

    def _value_of(self, parameter: inspect.Parameter, missing: str | None) -> Any:
        if parameter.name in self.given:
            return self.given.pop(parameter.name)
        if parameter.default is parameter.empty:
            why = "was not a tensor and was not recorded" if self.unknown else "the call in the run was not given"
            raise UsageError(
                f"{self.name} needs the argument {parameter.name}, which "
                + (f"was {missing} and was not kept" if missing else why)
                + f": give it with --arg {parameter.name}=VALUE, or arguments={{{parameter.name!r}: ...}}"
            )
        if self.unknown or missing:
            was = f" (it was {missing})" if missing else ""
            self.found.assumed.append(f"{parameter.name} = {parameter.default!r}{was}")
        return parameter.default


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # compiled functions may have no signature
        return []


def _put(tree: dict[str, Any], parts: list[str], leaf: Slot | _Kept) -> None:
    """Add a leaf unless its path is taken: in a damaged run, two values may have one path."""
    *above, last = parts
    for part in above:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return
    tree.setdefault(last, leaf)


def _is_restorable(value: Any) -> bool:
    """Whether a value was kept, or can be restored from its text."""
    if isinstance(value, OpaqueValue):
        return value.kind == "device" or (value.kind == "dtype" and value.text.isidentifier())
    return all(map(_is_restorable, _parts(value)))


def _has_slot(value: Any) -> bool:
    return isinstance(value, Slot) or any(map(_has_slot, _parts(value)))


def _parts(value: Any) -> Iterator[Any]:
    if type(value) is dict:
        yield from value
        yield from value.values()
    elif type(value) in (tuple, list):
        yield from value


def _build_value(node: Any) -> Any:
    if isinstance(node, Slot):
        return node
    if isinstance(node, _Kept):
        return node.value
    if all(part.isdecimal() for part in node):
        return tuple(_build_value(node[str(at)]) if str(at) in node else None for at in range(max(map(int, node)) + 1))
    return {part: _build_value(below) for part, below in node.items()}


def _fill_value(value: Any, fill: Callable[[Any], Any]) -> Any:
    if isinstance(value, (Slot, OpaqueValue)):
        return fill(value)
    if type(value) in (tuple, list):  # values of a user's own types stay as they are
        return type(value)(_fill_value(each, fill) for each in value)
    if type(value) is dict:
        return {name: _fill_value(each, fill) for name, each in value.items()}
    return value


def _keyword_code(name: str, value: str) -> str:
    """Write a keyword argument. A name from a run becomes code only if it is an identifier."""
    valid = name.isidentifier() and not keyword.iskeyword(name)
    return f"{name}={value}" if valid else f"**{{{name!r}: {value}}}"


def _value_code(value: Any, fill: Callable[[Slot | OpaqueValue], str]) -> str:
    if isinstance(value, (Slot, OpaqueValue)):
        return fill(value)
    if isinstance(value, tuple):
        inner = ", ".join(_value_code(each, fill) for each in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(_value_code(each, fill) for each in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_value_code(each, fill)}" for name, each in value.items()) + "}"
    if isinstance(value, np.generic):
        value = value.item()
    return repr(value) if type(value) is not float or np.isfinite(value) else f'float("{value}")'
