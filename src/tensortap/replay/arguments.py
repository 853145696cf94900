"""The arguments of a recorded call, put together again from the paths of its tensors and of what else it was given.

What the run did not keep is taken from what the user gives, or left at the defaults of the module's forward, and told.
Containers with tensors in them come back as tuples and dicts, whatever they were.
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

__all__ = ["Arguments", "Slot", "arranged", "moved", "parts_of"]


@dataclass(frozen=True)
class Slot:
    """The place of a recorded tensor."""

    path: str


@dataclass(frozen=True)
class _Kept:
    """A plain value of the run, in a tree of paths."""

    value: Any


@dataclass
class Arguments:
    """Positional and keyword arguments: a Slot stands for each tensor, an OpaqueValue for a dtype or a device."""

    positional: list[Any] = field(default_factory=list)
    keywords: dict[str, Any] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    """What the run did not keep, with the value that is used."""
    dropped: list[str] = field(default_factory=list)
    """What the run kept and the forward does not take."""

    def filled(
        self, tensor: Callable[[str], Any], named: Callable[[OpaqueValue], Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with tensors in place of the slots."""

        def value(slot: Slot | OpaqueValue) -> Any:
            return tensor(slot.path) if isinstance(slot, Slot) else named(slot)

        return [_filled(each, value) for each in self.positional], {
            name: _filled(each, value) for name, each in self.keywords.items()
        }

    def written(self, variable: Callable[[str], str], opaque: Callable[[OpaqueValue], str]) -> str:
        """The arguments as source code, with variables in place of the slots. `opaque` writes dtypes and devices."""

        def one(value: Any) -> str:
            return _written(value, lambda each: variable(each.path) if isinstance(each, Slot) else opaque(each))

        return ", ".join(
            [one(value) for value in self.positional]
            + [_keyword(name, one(value)) for name, value in self.keywords.items()]
        )

    @property
    def plain(self) -> list[str]:
        """Those without a tensor, in words."""
        every = [*((str(at), value) for at, value in enumerate(self.positional)), *self.keywords.items()]
        return [f"{name}={in_words(value)}" for name, value in every if not _holds_a_slot(value)]


def arranged(
    paths: Iterable[str],
    kept: Mapping[str, Any] | None,
    forward: Callable[..., Any],
    given: Mapping[str, Any],
    name: str,
) -> Arguments:
    """What to call `forward` with. `kept` are the plain arguments that the run has, None if it has not recorded any;
    `given` are arguments by name that come before those; `name` is for messages."""
    tree: dict[str, Any] = {}
    for path in paths:
        _put(tree, parts_of(path), Slot(path))
    found, lost = Arguments(), dict[str, str]()
    for path, value in (kept or {}).items():
        parts = parts_of(path)
        if _can_be_had(value):
            _put(tree, parts, _Kept(value))
        elif len(parts) > 1 and parts[0] in tree:  # beside tensors
            _put(tree, parts, _Kept(None))
            found.assumed.append(f"{path} = None (it was {value!r})")
        else:
            lost[parts[0]] = "too much to be kept" if path == LEFT_OUT else repr(value)
    places = {int(part): node for part, node in tree.items() if part.isdecimal()}
    count = max((int(part) for part in (*tree, *lost) if part.isdecimal()), default=-1) + 1
    found.positional = [_built(places[at]) if at in places else _HOLE for at in range(count)]
    found.keywords = {part: _built(node) for part, node in tree.items() if not part.isdecimal()}
    _Completion(found, _parameters(forward), dict(given), kept is None, lost, name).run()
    return found


def moved(kept: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The same plain arguments for a module that was moved to another device."""

    def told(value: OpaqueValue) -> OpaqueValue:
        return OpaqueValue("device", device) if value.kind == "device" else value

    return {path: _filled(value, told) for path, value in kept.items()}


def parts_of(path: str) -> list[str]:
    """
    >>> parts_of("past.0.k"), parts_of("a\\\\.b")
    (['past', '0', 'k'], ['a.b'])
    """
    return [part.replace("\\.", ".") for part in re.split(r"(?<!\\)\.", path)]


_HOLE = object()


@dataclass
class _Completion:
    """Puts in what was given in place of what was kept, and fills what neither has."""

    found: Arguments
    parameters: list[inspect.Parameter]
    given: dict[str, Any]
    unknown: bool
    """Whether the run did not record plain arguments at all."""
    lost: dict[str, str]
    """By position or keyword, what the run could not keep: what it was."""
    name: str

    def run(self) -> None:
        kinds = {parameter.kind for parameter in self.parameters}
        listed = [p for p in self.parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = [p for p in self.parameters if p.kind is p.KEYWORD_ONLY]
        if self.parameters:
            most = None if inspect.Parameter.VAR_POSITIONAL in kinds else len(listed)
            any_name = inspect.Parameter.VAR_KEYWORD in kinds
            self._drop(most, None if any_name else {p.name for p in (*listed, *by_name)})
        self._by_position(listed)
        for parameter in [*listed[len(self.found.positional) :], *by_name]:
            if parameter.name in self.found.keywords:
                self._replace(self.found.keywords, parameter.name, parameter.name)
                continue
            told = parameter.name in self.given
            value = self._value_of(parameter, self.lost.pop(parameter.name, None))
            if told:
                self.found.keywords[parameter.name] = value
        if inspect.Parameter.VAR_KEYWORD in kinds or not self.parameters:
            for each in list(self.given):
                self.lost.pop(each, None)
                self._replace(self.found.keywords, each, each)
        self.found.assumed += [f"no {each} (it was {was})" for each, was in self.lost.items()]
        if self.given:
            known = ", ".join(p.name for p in self.parameters) or "none that is known"
            raise UsageError(f"{self.name} takes no argument {next(iter(self.given))}; it takes {known}")

    def _drop(self, most: int | None, names: set[str] | None) -> None:
        """Another implementation need not take all that the module takes."""
        found = self.found
        while most is not None and len(found.positional) > most and not _holds_a_slot(found.positional[-1]):
            value = found.positional.pop()
            if self.lost.pop(str(len(found.positional)), None) is None:
                found.dropped.append(f"{len(found.positional)}={in_words(value)}")
        for each in [each for each in found.keywords if names is not None and each not in names]:
            if not _holds_a_slot(found.keywords[each]):
                found.dropped.append(f"{each}={in_words(found.keywords.pop(each))}")

    def _by_position(self, listed: list[inspect.Parameter]) -> None:
        found = self.found
        for at, value in enumerate(found.positional):
            parameter = listed[at] if at < len(listed) else None
            if value is not _HOLE:
                if parameter is not None:
                    self._replace(found.positional, at, parameter.name)
                continue
            lost = self.lost.pop(str(at), None)
            found.positional[at] = self._value_of(parameter, lost) if parameter is not None else None
            if parameter is None:
                found.assumed.append(f"argument {at} = None" + (f" (it was {lost})" if lost else ""))

    def _replace(self, where: Any, at: Any, name: str) -> None:
        """What is given takes the place of what was kept, but not of a tensor."""
        if name not in self.given:
            return
        kept = where[at] if isinstance(where, list) else where.get(at)
        if _holds_a_slot(kept):
            raise UsageError(f"{self.name}: argument {name} is a tensor that the run has; it cannot be given")
        value = self.given.pop(name)
        # A dtype has no other form on a command line than its name.
        where[at] = OpaqueValue(kept.kind, value) if isinstance(kept, OpaqueValue) and isinstance(value, str) else value

    def _value_of(self, parameter: inspect.Parameter, lost: str | None) -> Any:
        if parameter.name in self.given:
            return self.given.pop(parameter.name)
        if parameter.default is parameter.empty:
            why = "was no tensor and is not recorded" if self.unknown else "the call in the run was not given"
            raise UsageError(
                f"{self.name} needs the argument {parameter.name}, which "
                + (f"was {lost} and is not kept" if lost else why)
                + f": give it with --arg {parameter.name}=VALUE, or arguments={{{parameter.name!r}: ...}}"
            )
        if self.unknown or lost:
            was = f" (it was {lost})" if lost else ""
            self.found.assumed.append(f"{parameter.name} = {parameter.default!r}{was}")
        return parameter.default


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # compiled ones have no signature
        return []


def _put(tree: dict[str, Any], parts: list[str], leaf: Slot | _Kept) -> None:
    """Into its place, unless another stands there: in a damaged run, a value may have two."""
    *above, last = parts
    for part in above:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return
    tree.setdefault(last, leaf)


def _can_be_had(value: Any) -> bool:
    """Whether a value is whole, or can be had again."""
    if isinstance(value, OpaqueValue):
        return value.kind == "device" or (value.kind == "dtype" and value.text.isidentifier())
    return all(map(_can_be_had, _parts(value)))


def _holds_a_slot(value: Any) -> bool:
    return isinstance(value, Slot) or any(map(_holds_a_slot, _parts(value)))


def _parts(value: Any) -> Iterator[Any]:
    if type(value) is dict:
        yield from value
        yield from value.values()
    elif type(value) in (tuple, list):
        yield from value


def _built(node: Any) -> Any:
    if isinstance(node, Slot):
        return node
    if isinstance(node, _Kept):
        return node.value
    if all(part.isdecimal() for part in node):
        return tuple(_built(node[str(at)]) if str(at) in node else None for at in range(max(map(int, node)) + 1))
    return {part: _built(below) for part, below in node.items()}


def _filled(value: Any, filling: Callable[[Any], Any]) -> Any:
    if isinstance(value, (Slot, OpaqueValue)):
        return filling(value)
    if type(value) in (tuple, list):  # what a user gives may be anything, and stays as it is
        return type(value)(_filled(each, filling) for each in value)
    if type(value) is dict:
        return {name: _filled(each, filling) for name, each in value.items()}
    return value


def _keyword(name: str, value: str) -> str:
    """A name that a run tells is not put into a script unless it is one."""
    proper = name.isidentifier() and not keyword.iskeyword(name)
    return f"{name}={value}" if proper else f"**{{{name!r}: {value}}}"


def _written(value: Any, filling: Callable[[Slot | OpaqueValue], str]) -> str:
    if isinstance(value, (Slot, OpaqueValue)):
        return filling(value)
    if isinstance(value, tuple):
        inner = ", ".join(_written(each, filling) for each in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(_written(each, filling) for each in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_written(each, filling)}" for name, each in value.items()) + "}"
    if isinstance(value, np.generic):
        value = value.item()
    return repr(value) if type(value) is not float or np.isfinite(value) else f'float("{value}")'
