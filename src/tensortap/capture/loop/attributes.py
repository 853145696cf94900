"""Plain attributes of modules: numbers, strings, bools, dtypes and None, and tuples of these.

Attributes are read from the module's own dictionary. So no property and no `extra_repr` runs, which may be the user's
code. The values that these show are attributes of the module, too. All modules are checked once in each recorded step.
A check compares the objects of the attributes found before by identity; only a module that changed is read again.
Attributes of a `config` object are recorded of the first module that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from tensortap.capture.modules.tree import Site
from tensortap.capture.modules.unchanged import WatchedItems, changed_items
from tensortap.core.arguments import written
from tensortap.core.interrupts import suppress_errors
from tensortap.frameworks.base import Framework

__all__ = ["Attributes", "plain_items"]

_MOST_ITEMS = 64
_PLAIN = (bool, int, float, str, type(None))


class Attributes:
    """Notices which modules have other plain attributes than before."""

    def __init__(self, framework: Framework, note: Callable[[str, dict[str, Any]], None]) -> None:
        """`note` is called with a module's name and all of its attributes, when one has changed."""
        self._framework = framework
        self._note = note
        self._internal = frozenset(framework.internal_attributes())
        self._sites: Sequence[Site] = ()
        """The modules that were last checked."""
        self._watched: list[WatchedItems] = []
        self._owners: list[Site] = []
        """The module of each of the watched items."""
        self._configs: dict[int, str] = {}
        """The module that a config object is recorded with, by id."""

    def check(self, sites: Sequence[Site]) -> None:
        """Read the modules that are new or have changed."""
        changed = {id(self._owners[place]) for place in changed_items(self._watched)}
        if not changed and sites is self._sites:
            return
        self._sites = sites
        self._keep({id(site) for site in sites} - changed)
        known = {id(site) for site in self._owners}
        for site in sites:
            if id(site) not in known:
                with suppress_errors():  # a module with a dictionary of its own kind
                    self._read(site)

    def _keep(self, sites: Collection[int]) -> None:
        """Watch no others than these modules, by id."""
        kept = [place for place, site in enumerate(self._owners) if id(site) in sites]
        self._watched = [self._watched[place] for place in kept]
        self._owners = [self._owners[place] for place in kept]

    def _read(self, site: Site) -> None:
        own = vars(site.owner)
        found = dict(plain_items(own, self._framework, self._internal))
        self._watch(site, site.owner, own, found)
        if (config := own.get("config")) is not None and self._configs.setdefault(id(config), site.name) == site.name:
            inside = config if type(config) is dict else getattr(config, "__dict__", None)
            if isinstance(inside, dict) and not self._framework.is_module(config):
                plain = dict(plain_items(inside, self._framework))
                self._watch(site, None, inside, plain)
                found |= {f"config.{name}": value for name, value in plain.items()}
        self._note(site.name, written(found.items(), self._framework.opaque_value))

    def _watch(self, site: Site, owner: Any, of: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
        self._owners.append(site)
        self._watched.append(WatchedItems(owner, of, len(of), tuple(plain), tuple(plain.values())))


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
