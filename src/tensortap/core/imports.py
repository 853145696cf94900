"""Callbacks around the import of a module that some other code may import later.

This module imports nothing of the package: a started program loads it before anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["around_import"]


def around_import(
    name: str, after: Callable[[], None], before: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Call `before` and `after` around the first import of a module, and return a function that stops waiting for it.

    If the module is already loaded, neither is called. If it cannot be imported, `after` is not called.

    >>> stop = around_import("torch", after=lambda: print("torch is loaded"))  # doctest: +SKIP
    """
    finder = _Finder(name, before, after)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _Finder:
    """A finder that finds one module, through the finders behind it."""

    def __init__(self, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._name = name
        self._before = before
        self._after = after
        self._finding = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or self._finding:
            return None
        self._finding = True
        try:
            spec = find_spec(name)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]  # it stands for any loader
        return spec

    def load(self, loader: Any, module: ModuleType) -> None:
        # The module must not show who waited for it: its loader provides its source and its data files.
        module.__loader__ = loader
        if module.__spec__ is not None:
            module.__spec__.loader = loader
        self.remove()
        self._before()
        loader.exec_module(module)
        self._after()

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader:
    """The loader of the module, with the callbacks around its execution."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._finder.load(self._loader, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
