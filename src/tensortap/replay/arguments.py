"""The arguments of a recorded call, put together again from the paths of its tensors.

Only tensors are recorded. What else a module was called with is taken from what the user gives, or left at the defaults
of its forward, and told. Containers come back as tuples and dicts, whatever they were.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensortap.errors import UsageError

__all__ = ["Arguments", "Slot", "arranged", "parts_of"]


@dataclass(frozen=True)
class Slot:
    """The place of a recorded tensor."""

    path: str


@dataclass
class Arguments:
    """Positional and keyword arguments, with a Slot wherever a tensor goes."""

    positional: list[Any] = field(default_factory=list)
    keywords: dict[str, Any] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    """What was not recorded, with the value that is used."""

    def filled(self, tensor: Callable[[str], Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with tensors in place of the slots."""
        return [_filled(value, tensor) for value in self.positional], {
            name: _filled(value, tensor) for name, value in self.keywords.items()
        }

    def written(self, variable: Callable[[str], str]) -> str:
        """The arguments as one would write them, with variables in place of the slots."""
        return ", ".join(
            [_written(value, variable) for value in self.positional]
            + [_keyword(name, _written(value, variable)) for name, value in self.keywords.items()]
        )


def arranged(paths: Iterable[str], forward: Callable[..., Any], given: Mapping[str, Any], name: str) -> Arguments:
    """What to call `forward` with. `given` are arguments by name that were no tensors; `name` is for messages."""
    tree: dict[str, Any] = {}
    for path in paths:
        *above, last = parts_of(path)
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = Slot(path)
    found = Arguments()
    places = {int(part): node for part, node in tree.items() if part.isdecimal()}
    found.positional = [_built(places[at]) if at in places else _HOLE for at in range(max(places, default=-1) + 1)]
    found.keywords = {part: _built(node) for part, node in tree.items() if not part.isdecimal()}
    _complete(found, _parameters(forward), dict(given), name)
    return found


def parts_of(path: str) -> list[str]:
    """
    >>> parts_of("past.0.k"), parts_of("a\\\\.b")
    (['past', '0', 'k'], ['a.b'])
    """
    return [part.replace("\\.", ".") for part in re.split(r"(?<!\\)\.", path)]


_HOLE = object()


def _complete(found: Arguments, parameters: list[inspect.Parameter], given: dict[str, Any], name: str) -> None:
    """Fill what no tensor stands at."""
    listed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for at, value in enumerate(found.positional):
        parameter = listed[at] if at < len(listed) else None
        if value is not _HOLE:
            if parameter is not None and parameter.name in given:
                raise UsageError(f"{name}: argument {parameter.name} is a tensor that the run has; it cannot be given")
            continue
        found.positional[at] = _value_of(parameter, given, found, name) if parameter is not None else None
        if parameter is None:
            found.assumed.append(f"argument {at} = None")
    for parameter in [*listed[len(found.positional) :], *(p for p in parameters if p.kind is p.KEYWORD_ONLY)]:
        if parameter.name in found.keywords:
            continue
        told = parameter.name in given
        value = _value_of(parameter, given, found, name)
        if told:
            found.keywords[parameter.name] = value
    if open_ended or not parameters:
        found.keywords |= {key: given.pop(key) for key in list(given) if key not in found.keywords}
    if given:
        known = ", ".join(p.name for p in parameters) or "none that is known"
        raise UsageError(f"{name} takes no argument {next(iter(given))}; it takes {known}")


def _value_of(parameter: inspect.Parameter, given: dict[str, Any], found: Arguments, name: str) -> Any:
    if parameter.name in given:
        return given.pop(parameter.name)
    if parameter.default is parameter.empty:
        raise UsageError(
            f"{name} needs the argument {parameter.name}, which was no tensor and is not recorded: give it with "
            f"--arg {parameter.name}=VALUE, or arguments={{{parameter.name!r}: ...}}"
        )
    found.assumed.append(f"{parameter.name} = {parameter.default!r}")
    return parameter.default


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # compiled ones have no signature
        return []


def _built(node: Any) -> Any:
    if isinstance(node, Slot):
        return node
    if all(part.isdecimal() for part in node):
        return tuple(_built(node[str(at)]) if str(at) in node else None for at in range(max(map(int, node)) + 1))
    return {part: _built(below) for part, below in node.items()}


def _filled(value: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(value, Slot):
        return tensor(value.path)
    if isinstance(value, tuple):
        return tuple(_filled(each, tensor) for each in value)
    if isinstance(value, dict):
        return {name: _filled(each, tensor) for name, each in value.items()}
    return value


def _keyword(name: str, value: str) -> str:
    """A name that a run tells is not put into a script unless it is one."""
    proper = name.isidentifier() and not keyword.iskeyword(name)
    return f"{name}={value}" if proper else f"**{{{name!r}: {value}}}"


def _written(value: Any, variable: Callable[[str], str]) -> str:
    if isinstance(value, Slot):
        return variable(value.path)
    if isinstance(value, tuple):
        inner = ", ".join(_written(each, variable) for each in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_written(each, variable)}" for name, each in value.items()) + "}"
    return repr(value)
