"""The user's layout: `capture(layout=...)`, a TOML file or a mapping of the same form.

[mesh]                                    sizes of the axes; the last one has neighbouring ranks
dp = 2
tp = 2
[layout]                                  placements; `core.layouts` describes the notation
"layers.*.fc1.weight" = "(gate|up)[tp] h"
"layers.*:output" = "b[dp] s h"
[names]                                   global names of a rank's own modules
"layers.{i}" = "layers.{i+stage*2}"
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from tensortap.core.layouts import TensorLayoutText, parse_layout
from tensortap.core.placement import Mesh
from tensortap.core.records import KINDS, STATE_KINDS
from tensortap.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Layout", "LayoutRule", "NameRule", "read_layout"]

_TABLES = ("mesh", "layout", "names", "sizes")
_MICRO = "micro"
_PARTNERS = {"grad_output": "output", "grad_input": "input"}
_OPERATORS: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class LayoutRule:
    """A pattern of names, and the layouts of the tensors that it selects."""

    pattern: str
    kind: str
    """"" for parameters, buffers and their gradients."""
    path: str
    texts: tuple[str, ...]

    def selects(self, name: str, kind: str, path: str) -> bool:
        if not (fnmatchcase(name, self.pattern) or (not name and self.pattern == "(root)")):
            return False
        if not self.kind:
            return kind in STATE_KINDS
        return self.kind in (kind, _PARTNERS.get(kind)) and (not self.path or fnmatchcase(path, self.path))


@dataclass(frozen=True)
class ParsedRule(TensorLayoutText):
    """A layout with the rule that it belongs to."""

    of_gradient: bool = False
    """Whether the rule is for gradients, not for the values that they belong to."""


@dataclass(frozen=True)
class NameRule:
    """A rule that gives a rank's own modules their global names."""

    pattern: str
    target: str

    def apply(self, name: str, numbers: Mapping[str, int]) -> tuple[str, set[str]]:
        """Return the global name, and the axes that it depends on."""
        names = re.findall(r"\{(\w+)\}", self.pattern)
        escaped = re.escape(self.pattern)
        for each in names:
            escaped = escaped.replace(re.escape(f"{{{each}}}"), rf"(?P<{each}>\d+)")
        used: set[str] = set()

        def replaced(match: re.Match[str]) -> str:
            known = {**numbers, **{each: int(match[each]) for each in names}}
            return re.sub(r"\{([^{}]*)\}", lambda found: str(_value(found[1], known, used)), self.target)

        return re.sub(rf"(?<![^.]){escaped}(?![^.])", replaced, name), used - set(names)


@dataclass(frozen=True)
class Layout:
    """All rules of a layout."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    rules: Sequence[LayoutRule] = ()
    names: Sequence[NameRule] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    where: str = "layout"
    _parsed: dict[str, TensorLayoutText] = field(default_factory=dict, compare=False)

    @property
    def uses_micro(self) -> bool:
        return _MICRO in self.mesh

    def __bool__(self) -> bool:
        return bool(self.mesh or self.rules or self.names)

    def mesh_at(self, rank: int, world: int) -> Mesh | None:
        """Return the mesh that the layout gives, with the coordinates of a rank; None if it gives none."""
        own = {name: size for name, size in self.mesh.items() if name != _MICRO}
        if not own:
            return None
        if prod(own.values()) != world:
            sizes = " x ".join(f"{name} {size}" for name, size in own.items())
            raise UsageError(
                f"{self.where}: [mesh] has {prod(own.values())} processes ({sizes}), and there are {world}"
            )
        coordinates, rest = [], rank
        for size in reversed(own.values()):
            rest, at = divmod(rest, size)
            coordinates.append(at)
        return Mesh(tuple(own), tuple(own.values()), tuple(reversed(coordinates)))

    def parse(self, axes: Sequence[str]) -> None:
        """Read all texts. Raise UsageError for the first that is wrong."""
        for rule in self.rules:
            for text in rule.texts:
                self._parsed[text] = self._read(rule, text, axes)

    def _read(self, rule: LayoutRule, text: str, axes: Sequence[str]) -> TensorLayoutText:
        try:
            return parse_layout(self._with_sizes(text), axes)
        except ValueError as error:
            raise UsageError(f"{self.where}: {rule.pattern!r} = {text!r}: {error}") from None

    def rule_of(self, name: str, kind: str, path: str, dimensions: int) -> ParsedRule | None:
        """Return the first layout that selects a record. One with as many dimensions is preferred."""
        first: ParsedRule | None = None
        for rule in self.rules:
            if rule.selects(name, kind, path):
                for text in rule.texts:
                    found = self._parsed[text]
                    own = ParsedRule(text, found.terms, found.more, found.order, rule.kind.startswith("grad_"))
                    if len(found.terms) == dimensions:
                        return own
                    first = first or own
        return first

    def rename(self, names: Sequence[str], numbers: Mapping[str, int]) -> dict[str, tuple[str, set[str]]]:
        """Return the global name of each module that a rule renames, and the axes that it depends on."""
        found = {}
        for name in names:
            renamed, used = name, set[str]()
            for rule in self.names:
                try:
                    renamed, more = rule.apply(renamed, numbers)
                except ValueError as error:
                    raise UsageError(f"{self.where}: [names] {rule.pattern!r} = {rule.target!r}: {error}") from None
                used |= more
            if renamed != name or used:
                found[name] = renamed, used
        return found

    def _with_sizes(self, text: str) -> str:
        for name, size in self.sizes.items():
            text = re.sub(rf"(?<=\()\s*{re.escape(name)}(?=\s*:)", f"{name}={size}", text)
            text = re.sub(rf"(?<=[( ]){re.escape(name)}(?=[\[ )])(?=[^()]*\))", f"{name}={size}", text)
        return text


def read_layout(value: Any) -> Layout:
    """Return the layout of a path or a mapping; an empty one for None. Raise UsageError if it is not one."""
    if value is None:
        return Layout()
    if isinstance(value, Layout):
        return value
    where = "layout"
    if isinstance(value, (str, Path)):
        where = str(value)
        try:
            value = tomllib.loads(Path(value).read_text())
        except OSError as error:
            raise UsageError(f"layout={where!r} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"layout={where!r} is not a TOML file: {error}") from error
    if not isinstance(value, Mapping):
        raise UsageError(f"layout: {value!r} is neither the path of a TOML file nor a mapping")
    if not any(isinstance(each, Mapping) for each in value.values()):
        value = {"layout": value}  # placements alone
    if unknown := sorted(set(value) - set(_TABLES)):
        raise UsageError(f"{where}: there is no table [{unknown[0]}]; known are {', '.join(_TABLES)}")
    tables = {name: value.get(name, {}) for name in _TABLES}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise UsageError(f"{where}: [{name}] is not a table")
    for name in ("mesh", "sizes"):
        for key, size in tables[name].items():
            if type(size) is not int or size < 1:
                raise UsageError(f"{where}: [{name}] {key} = {size!r} is not a number of 1 or more")
    return Layout(
        dict(tables["mesh"]),
        [_rule(str(key), text, where) for key, text in tables["layout"].items()],
        [NameRule(str(key), _text(target, key, where)) for key, target in tables["names"].items()],
        dict(tables["sizes"]),
        where,
    )


def _rule(key: str, value: Any, where: str) -> LayoutRule:
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UsageError(f'{where}: {key!r} = {value!r} is not a layout, which is a text like "b[dp] s h"')
    pattern, colon, rest = key.partition(":")
    kind, _, path = rest.partition(".")
    if colon and kind not in KINDS:
        raise UsageError(f"{where}: {key!r}: {kind!r} is not a kind of record; known are {', '.join(KINDS)}")
    return LayoutRule(pattern, kind if kind not in STATE_KINDS or colon else "", path, texts)


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: [names] {key!r} = {value!r} is not a name")
    return value


def _value(text: str, known: Mapping[str, int], used: set[str]) -> int:
    """Return the value of a small expression of whole numbers and known names."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, known, used)
    except SyntaxError:
        raise ValueError(f"{text!r} is not an expression of numbers and names") from None


def _evaluate(node: ast.AST, known: Mapping[str, int], used: set[str]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in known:
            raise ValueError(f"{node.id!r} is not known; known are {', '.join(sorted(known))}")
        used.add(node.id)
        return known[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left, known, used), _evaluate(node.right, known, used)
        if isinstance(node.op, (ast.FloorDiv, ast.Mod)) and not right:
            raise ValueError("it divides by zero")
        return int(_OPERATORS[type(node.op)](left, right))
    raise ValueError("only numbers, names and + - * // % may be used")
