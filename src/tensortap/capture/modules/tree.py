"""The modules of a model by structural name: without wrappers, shared modules once, compiled parts marked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensortap.frameworks.base import Framework

__all__ = ["ModuleAlias", "NamesOf", "Site", "Tree"]

NamesOf = Callable[[Sequence[tuple[str, Any]]], Mapping[str, str]]
"""Returns the names of modules in a larger model, by the names that they have here."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A module and its position in the model."""

    name: str
    cls: str
    module: Any
    """The module that is hooked."""
    owner: Any
    """The module that owns parameters and buffers. It differs from `module` only if that is a compiled wrapper."""
    inside: str | None
    """Name of the compiled module that contains this one, if any."""
    base: str
    """The framework's own class that its class inherits from; "" if it is that class, or purely user-defined."""
    callable: bool
    """Whether the module computes anything itself; a list of modules does not."""
    compiled: bool = False
    """Whether calling it runs a compiled graph."""


@dataclass(frozen=True, slots=True)
class ModuleAlias:
    """A second name of a shared module."""

    name: str
    cls: str
    first: str


class Tree:
    """All sites of a model in definition order, and their aliases."""

    def __init__(
        self,
        framework: Framework,
        model: Any,
        eager: bool = False,
        compiled: Collection[int] = (),
        names: NamesOf | None = None,
    ) -> None:
        """Walk the model. `compiled`: ids of modules that run compiled, through a wrapper outside of the model.

        `names` returns the names of modules in a larger model of which this one is a part.
        """
        self.eager = eager
        self.names = names
        self.sites: list[Site] = []
        self.aliases: list[ModuleAlias] = []
        self.wrappers: list[Any] = []
        self._framework = framework
        self._compiled = compiled
        self._known: dict[int, str] = {}
        self._walk(model, "", None)
        if names is not None:
            self._rename(names([(site.name, site.owner) for site in self.sites]))

    @property
    def modules(self) -> Collection[int]:
        """The ids of all modules, wrappers included."""
        return self._known

    def _rename(self, names: Mapping[str, str]) -> None:
        def renamed(name: str) -> str:
            return names.get(name, name)

        self.sites = [
            replace(site, name=renamed(site.name), inside=None if site.inside is None else renamed(site.inside))
            for site in self.sites
        ]
        self.aliases = [replace(each, first=renamed(each.first)) for each in self.aliases]
        self._known = {key: renamed(name) for key, name in self._known.items()}

    def _walk(self, module: Any, name: str, inside: str | None) -> None:
        if (first := self._known.get(id(module))) is not None:
            self.aliases.append(ModuleAlias(name, type(module).__name__, first))
            return
        outermost, compiled = module, False
        while True:
            self._known[id(module)] = name
            compiled = compiled or (not self.eager and self._framework.compiled(module)) or id(module) in self._compiled
            attribute = self._framework.wrapped(module)
            children = self._framework.children(module)
            inner = None if attribute is None else dict(children).get(attribute)
            if inner is None:
                break
            self.wrappers.append(module)
            module = inner
        # The module inside a compiled wrapper runs in the graph, so only the wrapper can be hooked. Every other wrapper
        # calls its module, and that is the one the user wrote.
        site = Site(
            name=name,
            cls=type(module).__name__,
            module=outermost if compiled and self._framework.wrapped(outermost) else module,
            owner=module,
            inside=inside,
            base=base if (base := self._framework.own_class(module)) != type(module).__name__ else "",
            callable=self._framework.callable(module),
            compiled=compiled,
        )
        self.sites.append(site)
        below = inside if inside is not None else (name if compiled else None)
        for key, child in children:
            self._walk(child, f"{name}.{key}" if name else key, below)
