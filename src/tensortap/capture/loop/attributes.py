"""Plain attributes of modules: numbers, strings, bools, dtypes and None, and tuples of these.

Attributes are read from the module's own dictionary. So no property and no `extra_repr` runs, which may be the user's
code: what these show is an attribute of the module, too. All modules are checked once in each recorded step. A check
compares the objects of the attributes found before by identity, half a microsecond for each module; only a module that
changed is read again. Attributes of a `config` object are recorded of the first module that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import is_, itemgetter
from typing import Any

from tensortap.capture.tree import Site
from tensortap.core.arguments import written
from tensortap.core.interrupts import suppress_errors
from tensortap.frameworks.base import Framework

__all__ = ["Attributes", "plain_items"]

_MOST_ITEMS = 64
_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True)
class _Watched:
    """A dictionary, and its plain values when it was last read."""

    of: Mapping[str, Any]
    size: int
    get: Callable[[Mapping[str, Any]], Any]
    values: Sequence[Any]

    def changed(self) -> bool:
        if len(self.of) != self.size:
            return True
        try:
            return not all(map(is_, self.get(self.of), self.values))
        except KeyError:
            return True


class Attributes:
    """Notices which modules have other plain attributes than before."""

    def __init__(self, framework: Framework, note: Callable[[str, dict[str, Any]], None]) -> None:
        """`note` is called with a module's name and all of its attributes, when one has changed."""
        self._framework = framework
        self._note = note
        self._internal = frozenset(framework.internal_attributes())
        self._watched: dict[str, list[_Watched]] = {}
        self._configs: dict[int, str] = {}
        """The module that a config object is recorded with, by id."""

    def check(self, sites: Sequence[Site]) -> None:
        """Read the modules that are new or have changed."""
        for site in sites:
            known = self._watched.get(site.name)
            if known is None or known[0].of is not vars(site.owner) or any(each.changed() for each in known):
                with suppress_errors():  # a module with a dictionary of its own kind
                    self._read(site)

    def _read(self, site: Site) -> None:
        own = vars(site.owner)
        found = dict(plain_items(own, self._framework, self._internal))
        watched = [_watch(own, found)]
        if (config := own.get("config")) is not None and self._configs.setdefault(id(config), site.name) == site.name:
            inside = config if type(config) is dict else getattr(config, "__dict__", None)
            if isinstance(inside, dict) and not self._framework.is_module(config):
                plain = dict(plain_items(inside, self._framework))
                watched.append(_watch(inside, plain))
                found |= {f"config.{name}": value for name, value in plain.items()}
        self._watched[site.name] = watched
        self._note(site.name, written(found.items(), self._framework.opaque_value))


def plain_items(
    values: Mapping[Any, Any], framework: Framework, without: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a dictionary that are plain."""
    for name, value in list(values.items()):
        if type(name) is str and name not in without and _is_plain(value, framework):
            yield name, value


def _is_plain(value: Any, framework: Framework) -> bool:
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, Enum):
        return True
    if kind is tuple:
        return len(value) <= _MOST_ITEMS and all(type(each) in _PLAIN for each in value)
    return framework.opaque_value(value) is not None


def _watch(values: Mapping[str, Any], plain: Mapping[str, Any]) -> _Watched:
    if len(plain) < 2:  # itemgetter returns a tuple for two names or more
        names = tuple(plain)
        return _Watched(values, len(values), lambda now: [now[name] for name in names], tuple(plain.values()))
    return _Watched(values, len(values), itemgetter(*plain), tuple(plain.values()))
