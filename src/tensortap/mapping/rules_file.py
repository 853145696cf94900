"""Reads rules from TOML, or from a mapping of the same form, and says what is wrong with them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tensortap.errors import RunNotFound, RunUnreadable, UsageError
from tensortap.mapping.patterns import wildcards
from tensortap.mapping.rules import SIDES, ClassRule, Ignore, ModuleRule, Rules, TensorRule, ValueRule

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["FORMAT", "read_rules", "shipped_rules"]

FORMAT = 1
_TABLES = ("module", "class", "tensor", "value", "ignore")
_EITHER = "torch and paddle, or reference and candidate"


@cache
def shipped_rules() -> Rules:
    """What is known of torch and paddle."""
    return read_rules(Path(__file__).with_name("torch_paddle.toml"))


def read_rules(source: str | os.PathLike[str] | Mapping[str, Any]) -> Rules:
    """The rules of a TOML file, or of a mapping of the same form.

    >>> read_rules({"module": [{"torch": "layer*.conv1", "paddle": "stages.*.conv"}]}).modules[0].names["torch"]
    'layer*.conv1'
    """
    name = "the mapping" if isinstance(source, Mapping) else os.fspath(source)
    data = source if isinstance(source, Mapping) else _load(Path(name))
    for key in data:
        if key not in (*_TABLES, "version", "structure"):
            raise UsageError(f"{name}: {key!r} is no key here; there are version, structure, {', '.join(_TABLES)}")
    if data.get("version", FORMAT) != FORMAT:
        raise UsageError(f"{name}: version = {data['version']!r}, but this tensortap reads version {FORMAT}")
    structure = data.get("structure", True)
    if not isinstance(structure, bool):
        raise UsageError(f"{name}: structure = {structure!r}; expected true or false")
    return Rules(
        modules=tuple(_module(entry) for entry in _entries(data, "module", name)),
        classes=tuple(_class(entry) for entry in _entries(data, "class", name)),
        tensors=tuple(_tensor(entry) for entry in _entries(data, "tensor", name)),
        values=tuple(_value(entry, "MODULE KIND PATH") for entry in _entries(data, "value", name)),
        ignores=tuple(_ignore(entry) for entry in _entries(data, "ignore", name)),
        structure=structure,
        source=name,
    )


def _load(path: Path) -> Mapping[str, Any]:
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        found: Mapping[str, Any] = tomllib.loads(text)
    except FileNotFoundError as error:
        raise RunNotFound(f"there is no rules file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RunUnreadable(f"the rules file {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        _refuse_list_of_names(path, text)
        raise UsageError(f"{path} is no TOML: {error}") from error
    return found


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


class _Entry:
    """One table of a file: takes its keys one by one, and complains of what is left."""

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
            raise self.wrong(key, value, words)
        return value

    def names(self, several: bool = False) -> dict[str, Any]:
        """What it calls both sides; with `several`, a list of names is one too."""
        pair = next((pair for pair in SIDES if any(side in self._values for side in pair)), ())
        found = {}
        for side in pair:
            value = self._values.pop(side, None)
            if value is None:
                raise UsageError(f"{self.where}: {side} is missing; expected a name for {' and '.join(pair)}")
            words = [value] if isinstance(value, str) else value
            fine = isinstance(words, list) and words and all(isinstance(word, str) for word in words)
            if not fine or (not several and not isinstance(value, str)):
                raise self.wrong(side, value, "a name, or a list of names" if several else "a name")
            words = [word.removeprefix("(root)") for word in words]  # the root's name is empty
            found[side] = tuple(words) if several else words[0]
        if not found:
            raise UsageError(f"{self.where}: it names no sides; expected {_EITHER}")
        self._known += pair
        return found

    def one_side(self) -> tuple[str, str]:
        given = [side for pair in SIDES for side in pair if side in self._values]
        if len(given) != 1:
            raise UsageError(f"{self.where}: expected one of torch, paddle, reference, candidate and a name")
        value = self._values.pop(given[0])
        if not isinstance(value, str):
            raise self.wrong(given[0], value, "a name")
        return given[0], value

    def permutation(self) -> tuple[int, ...]:
        value = self.take("permute", list, [], "a list of axes")
        if not all(type(axis) is int for axis in value) or sorted(value) != list(range(len(value))):
            raise self.wrong("permute", value, "every axis once, like [1, 0]")
        return tuple(value)

    def tables(self, key: str) -> list[_Entry]:
        """Rules within a rule."""
        self._known.append(key)
        return _tables(self._values.pop(key, []), f"{self.where}, {key}")

    def done(self) -> None:
        if self._values:
            key = next(iter(self._values))
            raise UsageError(f"{self.where}: {key!r} is no key here; there are {', '.join(dict.fromkeys(self._known))}")

    def wrong(self, key: str, value: Any, expected: str) -> UsageError:
        return UsageError(f"{self.where}: {key} = {value!r}; expected {expected}")


def _entries(data: Mapping[str, Any], key: str, name: str) -> list[_Entry]:
    return _tables(data.get(key, []), f"{name}: [[{key}]]")


def _tables(value: Any, where: str) -> list[_Entry]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: expected a list of tables, not {value!r}")
    return [_Entry(each, f"{where} {number}") for number, each in enumerate(value, 1)]


def _module(entry: _Entry) -> ModuleRule:
    names = entry.names()
    regex = entry.take("regex", str, "", "the side whose name is a regular expression")
    entry.done()
    if regex and regex not in names:
        raise entry.wrong("regex", regex, " or ".join(names))
    if regex:
        _check_regex(entry, names, regex)
    else:
        _check_wildcards(entry, list(names.values()))
    return ModuleRule(names, regex, entry.where)


def _tensor(entry: _Entry) -> TensorRule:
    names = entry.names(several=True)
    permute, axis = entry.permutation(), entry.take("axis", int, 0, "the number of an axis")
    bessel = entry.take("bessel", bool, False, "true or false")
    entry.done()
    if axis < 0:
        raise entry.wrong("axis", axis, "0 or more")
    if all(len(words) > 1 for words in names.values()):
        raise UsageError(f"{entry.where}: both sides are lists; expected one name on one of them")
    _check_wildcards(entry, [word for words in names.values() for word in words])
    return TensorRule(names, permute, axis, bessel, entry.where)


def _value(entry: _Entry, form: str) -> ValueRule:
    names = entry.names()
    permute = entry.permutation()
    entry.done()
    for side, name in names.items():
        words = name.split(" ")
        if len(words) != len(form.split(" ")) or words[-2] not in ("input", "output"):
            raise entry.wrong(side, name, f"'{form}', where KIND is input or output; gradients follow")
    _check_wildcards(entry, list(names.values()))
    return ValueRule(names, permute, entry.where)


def _ignore(entry: _Entry) -> Ignore:
    side, pattern = entry.one_side()
    why = entry.take("why", str, "", "a reason")
    entry._known.append(side)
    entry.done()
    return Ignore(side, pattern, why or f"ignored by {entry.where}", entry.where)


def _class(entry: _Entry) -> ClassRule:
    names = entry.names(several=True)
    tensors = tuple(_tensor(each) for each in entry.tables("tensor"))
    values = tuple(_value(each, "KIND PATH") for each in entry.tables("value"))
    ignores = tuple(_ignore(each) for each in entry.tables("ignore"))
    whole = entry.take("whole", bool, False, "true or false")
    like = entry.take("like", str, "", "the name of a class")
    entry.done()
    if any("*" in words for words in names.values()) and not tensors:
        raise UsageError(f"{entry.where}: '*' is any class that has the tensors named; expected tensor = [...]")
    return ClassRule(names, tensors, values, ignores, whole, like, entry.where)


def _check_wildcards(entry: _Entry, names: list[str]) -> None:
    if any(wildcards(name) != wildcards(names[0]) for name in names):
        raise UsageError(
            f"{entry.where}: {' and '.join(map(repr, names))} have other wildcards; expected the same ones"
        )


def _check_regex(entry: _Entry, names: Mapping[str, str], side: str) -> None:
    other = next(name for key, name in names.items() if key != side)
    try:
        pattern = re.compile(names[side])
    except re.error as error:
        raise entry.wrong(side, names[side], f"a regular expression: {error}") from error
    try:  # matches, with every group empty
        re.compile(f"{pattern.pattern}|").sub(other, "")
    except (re.error, IndexError) as error:
        raise UsageError(f"{entry.where}: {other!r} cannot be made from {names[side]!r}: {error}") from error
