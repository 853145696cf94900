"""Reads rules from TOML, or from a mapping of the same form, and reports errors in them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tensortap.core.file_io import check_regular
from tensortap.errors import RunNotFound, RunUnreadable, UsageError
from tensortap.mapping.patterns import wildcards
from tensortap.mapping.rules import SIDES, ClassRule, IgnoreRule, ModuleRule, Rules, TensorRule, ValueRule

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["FORMAT", "read_rules", "shipped_rules"]

FORMAT = 1
_LARGEST = 16 << 20
"""Bytes of a rules file."""
_TABLES = ("module", "class", "tensor", "value", "ignore")
_EITHER = "torch and paddle, or reference and candidate"


@cache
def shipped_rules() -> Rules:
    """Return the rules for torch and paddle."""
    return read_rules(Path(__file__).with_name("torch_paddle.toml"))


def read_rules(source: str | os.PathLike[str] | Mapping[str, Any]) -> Rules:
    """Read rules from a TOML file, or from a mapping of the same form.

    >>> read_rules({"module": [{"torch": "layer*.conv1", "paddle": "stages.*.conv"}]}).modules[0].names["torch"]
    'layer*.conv1'
    """
    name = "the mapping" if isinstance(source, Mapping) else os.fspath(source)
    data = source if isinstance(source, Mapping) else _load(Path(name))
    for key in data:
        if key not in (*_TABLES, "version", "structure"):
            raise UsageError(f"{name}: unknown key {key!r}; expected version, structure, {', '.join(_TABLES)}")
    if data.get("version", FORMAT) != FORMAT:
        raise UsageError(f"{name}: version = {data['version']!r}, but this tensortap reads version {FORMAT}")
    structure = data.get("structure", True)
    if not isinstance(structure, bool):
        raise UsageError(f"{name}: structure = {structure!r}; expected true or false")
    return Rules(
        modules=tuple(_module(table) for table in _top_level_tables(data, "module", name)),
        classes=tuple(_class(table) for table in _top_level_tables(data, "class", name)),
        tensors=tuple(_tensor(table) for table in _top_level_tables(data, "tensor", name)),
        values=tuple(_value(table, "MODULE KIND PATH") for table in _top_level_tables(data, "value", name)),
        ignores=tuple(_ignore(table) for table in _top_level_tables(data, "ignore", name)),
        structure=structure,
        source=name,
    )


def _load(path: Path) -> Mapping[str, Any]:
    text = _read_text(path)
    try:
        found: Mapping[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        _refuse_list_of_names(path, text)
        raise UsageError(f"{path} is not TOML: {error}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; deeply nested brackets
        raise UsageError(f"{path} cannot be read as rules: {error}") from error
    return found


def _read_text(path: Path) -> str:
    try:
        about = path.stat()
        check_regular(path, about.st_mode)
        if about.st_size > _LARGEST:
            raise RunUnreadable(f"{path} is no rules file: it has {about.st_size:,} bytes, of {_LARGEST:,} at most")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RunNotFound(f"there is no rules file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RunUnreadable(f"the rules file {path} cannot be read: {error}") from error


def _refuse_list_of_names(path: Path, text: str) -> None:
    """Raise UsageError for a file of lines 'candidate name = reference name', and show the same as TOML."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines or any("=" not in line or line.lstrip().startswith("[") for line in lines):
        return
    candidate, _, reference = (part.strip() for part in lines[0].partition("="))
    raise UsageError(
        f"{path} is a list of names, which is no longer read. As TOML, each on a line of its own: structure = false, "
        f"then for each name [[module]], candidate = {json.dumps(candidate)}, reference = {json.dumps(reference)}"
    )


class _RuleTable:
    """One table of a file; its keys are taken one by one, and `done` rejects any that remain."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise UsageError(f"{where}: expected a table of keys, not {values!r}")
        self.where = where
        self._values = dict(values)
        self._known: list[str] = []

    def take(self, key: str, kind: type, default: Any, words: str) -> Any:
        self._known.append(key)
        value = self._values.pop(key, default)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise self.error(key, value, words)
        return value

    def names(self, several: bool = False) -> dict[str, Any]:
        """Take the names of both sides; with `several`, a list of names is accepted."""
        pair = next((pair for pair in SIDES if any(side in self._values for side in pair)), ())
        found = {}
        for side in pair:
            value = self._values.pop(side, None)
            if value is None:
                raise UsageError(f"{self.where}: {side} is missing; expected a name for {' and '.join(pair)}")
            words = [value] if isinstance(value, str) else value
            fine = isinstance(words, list) and words and all(isinstance(word, str) for word in words)
            if not fine or (not several and not isinstance(value, str)):
                raise self.error(side, value, "a name, or a list of names" if several else "a name")
            words = [word.removeprefix("(root)") for word in words]  # the root's name is empty
            found[side] = tuple(words) if several else words[0]
        if not found:
            raise UsageError(f"{self.where}: it names no sides; expected {_EITHER}")
        self._known += pair
        return found

    def one_side(self) -> tuple[str, str]:
        given = [side for pair in SIDES for side in pair if side in self._values]
        if len(given) != 1:
            raise UsageError(f"{self.where}: expected a name for one of torch, paddle, reference, candidate")
        value = self._values.pop(given[0])
        self._known.append(given[0])
        if not isinstance(value, str):
            raise self.error(given[0], value, "a name")
        return given[0], value

    def permutation(self) -> tuple[int, ...]:
        value = self.take("permute", list, [], "a list of axes")
        if not all(type(axis) is int for axis in value) or sorted(value) != list(range(len(value))):
            raise self.error("permute", value, "every axis once, like [1, 0]")
        return tuple(value)

    def tables(self, key: str) -> list[_RuleTable]:
        """Take the rules nested in a rule."""
        self._known.append(key)
        return _tables(self._values.pop(key, []), f"{self.where}, {key}")

    def done(self) -> None:
        if self._values:
            key = next(iter(self._values))
            raise UsageError(f"{self.where}: unknown key {key!r}; expected {', '.join(dict.fromkeys(self._known))}")

    def error(self, key: str, value: Any, expected: str) -> UsageError:
        return UsageError(f"{self.where}: {key} = {value!r}; expected {expected}")


def _top_level_tables(data: Mapping[str, Any], key: str, name: str) -> list[_RuleTable]:
    return _tables(data.get(key, []), f"{name}: [[{key}]]")


def _tables(value: Any, where: str) -> list[_RuleTable]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: expected a list of tables, not {value!r}")
    return [_RuleTable(each, f"{where} {number}") for number, each in enumerate(value, 1)]


def _module(table: _RuleTable) -> ModuleRule:
    names = table.names()
    regex = table.take("regex", str, "", "the side whose name is a regular expression")
    table.done()
    if regex and regex not in names:
        raise table.error("regex", regex, " or ".join(names))
    if regex:
        _check_regex(table, names, regex)
    else:
        _check_wildcards(table, list(names.values()))
    return ModuleRule(names, regex, table.where)


def _tensor(table: _RuleTable) -> TensorRule:
    names = table.names(several=True)
    permute, axis = table.permutation(), table.take("axis", int, 0, "the number of an axis")
    bessel = table.take("bessel", bool, False, "true or false")
    table.done()
    if axis < 0:
        raise table.error("axis", axis, "0 or more")
    if all(len(words) > 1 for words in names.values()):
        raise UsageError(f"{table.where}: both sides are lists; expected one name on one of them")
    _check_wildcards(table, [word for words in names.values() for word in words])
    return TensorRule(names, permute, axis, bessel, table.where)


def _value(table: _RuleTable, form: str) -> ValueRule:
    names = table.names()
    permute = table.permutation()
    table.done()
    for side, name in names.items():
        words = name.split(" ")
        if len(words) != len(form.split(" ")) or words[-2] not in ("input", "output"):
            raise table.error(side, name, f"'{form}', where KIND is input or output; gradients follow")
    _check_wildcards(table, list(names.values()))
    return ValueRule(names, permute, table.where)


def _ignore(table: _RuleTable) -> IgnoreRule:
    side, pattern = table.one_side()
    why = table.take("why", str, "", "a reason")
    table.done()
    return IgnoreRule(side, pattern, why or f"ignored by {table.where}", table.where)


def _class(table: _RuleTable) -> ClassRule:
    names = table.names(several=True)
    tensors = tuple(_tensor(each) for each in table.tables("tensor"))
    values = tuple(_value(each, "KIND PATH") for each in table.tables("value"))
    ignores = tuple(_ignore(each) for each in table.tables("ignore"))
    whole = table.take("whole", bool, False, "true or false")
    like = table.take("like", str, "", "the name of a class")
    table.done()
    if any("*" in words for words in names.values()) and not tensors:
        raise UsageError(f"{table.where}: '*' is any class that has the named tensors; expected tensor = [...]")
    return ClassRule(names, tensors, values, ignores, whole, like, table.where)


def _check_wildcards(table: _RuleTable, names: list[str]) -> None:
    if any(wildcards(name) != wildcards(names[0]) for name in names):
        raise UsageError(
            f"{table.where}: {' and '.join(map(repr, names))} differ in their wildcards; expected the same ones"
        )


def _check_regex(table: _RuleTable, names: Mapping[str, str], side: str) -> None:
    other = next(name for key, name in names.items() if key != side)
    try:
        pattern = re.compile(names[side])
    except (re.error, OverflowError, RecursionError) as error:
        raise table.error(side, names[side], f"a regular expression: {error}") from error
    try:  # the added alternative matches the empty string, with every group empty
        re.compile(f"{pattern.pattern}|").sub(other, "")
    except (re.error, IndexError) as error:
        raise UsageError(f"{table.where}: {other!r} is not a replacement for {names[side]!r}: {error}") from error
