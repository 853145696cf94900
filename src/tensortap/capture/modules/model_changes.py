"""Follows a model that changes while it is tapped: modules are added, replaced, removed or compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.modules.tree import Site, Tree
from tensortap.capture.modules.unchanged import identify_values
from tensortap.capture.selection import Selection
from tensortap.capture.watching.clock import Clock
from tensortap.capture.watching.watcher import Watcher
from tensortap.frameworks.base import Framework

__all__ = ["ModelChanges"]


class ModelChanges:
    """Keeps the watcher's modules up to date.

    The tree is walked again only after something has shown a change: the framework's own notice, or the signature of a
    container after a step. New modules are then watched from the next outermost call on.

    A compiled wrapper around a tapped module may exist before the tap or be made later. When it is called for the first
    time, hooks move from the module and its parts to the wrapper, before the compiler reads them. So the graph is the
    same as without a tap.
    """

    def __init__(
        self,
        framework: Framework,
        model: Any,
        selection: Selection,
        tree: Tree,
        clock: Clock,
        book: CoverageBook,
        watcher: Watcher,
        failed: Callable[[Exception], None],
    ) -> None:
        self._framework = framework
        self._model = model
        self._selection = selection
        self._tree = tree
        self._clock = clock
        self._book = book
        self._watcher = watcher
        self._failed = failed
        self._wrappers: dict[int, list[Any]] = {}
        """Compiled wrappers that are not part of the model, by the id of the module that each wraps."""
        self._compiled: set[int] = set()
        """Ids of modules whose wrapper has been called."""
        self._containers, self._known = self._take_signatures()
        self.compiled: Callable[[list[Site]], None] = lambda _: None
        """Called with the watched sites after one of them was compiled."""

    def place(self, undo: ExitStack) -> None:
        """Listen to changes of the model."""
        self._watcher.refresh, self._watcher.check_model = self.refresh, self.check
        remove = self._framework.on_change(self._changed, self._wrapped)
        if remove is None:
            self._watcher.stale, self._watcher.refresh, self._watcher.check_model = True, self._look, self._look_later
        else:
            undo.callback(remove)

    def check(self) -> None:
        """Take note of a change that the framework did not report."""
        self._watcher.stale = self._watcher.stale or self._has_changed()

    def _look_later(self) -> None:
        self._watcher.stale = True

    def _look(self) -> None:
        """Look for changes at the first call of a step, where the framework reports none."""
        self._watcher.stale = False
        if self._has_changed():
            self.refresh()

    def _has_changed(self) -> bool:
        return bool(self._signatures(self._containers) != self._known)

    def refresh(self) -> None:
        """Walk the model again, and hook what has changed."""
        self._watcher.stale = False
        tree = Tree(self._framework, self._model, self._tree.eager, self._compiled, self._tree.names)
        before = {site.name: site for site in self._tree.sites}
        chosen = [s for s in tree.sites if self._selection.wants_module(s.name, s.cls, s.owner)]
        self._tree = tree
        self._containers, self._known = self._take_signatures()
        step = self._clock.step
        fresh = []
        for site in chosen:
            old = before.get(site.name)
            if old is None or old.owner is not site.owner:
                fresh.append(site)
                self._book.follow(site, f"{'added' if old is None else 'replaced'} at step {step}")
                self._book.remark(site.name, self._framework.remarks(site.owner))
            else:
                self._book.follow(site, self._how_compiled(old, site, step))
        there = {site.name for site in tree.sites}
        for name in before.keys() - there:
            self._book.remark(name, f"removed at step {step}")
        self._book.set_aliases(tree.aliases)
        self._watcher.follow(tree, chosen, fresh, self._called_wrappers())
        if any(site.inside is not None for site in chosen):
            self.compiled(chosen)

    def _how_compiled(self, old: Site, site: Site, step: int) -> str:
        if site.inside is not None and old.inside is None:
            return f"in a compiled graph since step {step}"
        if site.compiled and not old.compiled:
            unseen = "; calls of the uncompiled module are not seen" if id(site.owner) in self._compiled else ""
            return f"compiled at step {step}, and recorded from outside since{unseen}"
        return ""

    def _take_signatures(self) -> tuple[list[Any], Any]:
        """Return the containers, and what is equal as long as they contain the same modules."""
        modules = [each for site in self._tree.sites for each in (site.owner, site.module)]
        containers = list({id(module): module for module in modules if self._framework.children(module)}.values())
        return containers, self._signatures(containers)

    def _signatures(self, containers: list[Any]) -> Any:
        if self._framework.children_attribute is not None:
            return identify_values(containers, self._framework.children_attribute)
        return [self._framework.signature(module) for module in containers]

    # --- what the framework reports; it runs in the user's own calls, so nothing may escape ----------------------
    def _changed(self, module: Any) -> None:
        if id(module) in self._tree.modules:
            self._watcher.stale = True
            if self._framework.compiled(module):  # its hooks must move before the next call
                self._attempt(self.refresh)

    def _wrapped(self, wrapper: Any) -> None:
        if not self._tree.eager:  # else it runs uncompiled, and the hooks of its modules with it
            self._attempt(partial(self._note_wrapper, wrapper))

    def _note_wrapper(self, wrapper: Any) -> None:
        inner = wrapper
        while (attribute := self._framework.wrapped(inner)) is not None:
            inner = dict(self._framework.children(inner)).get(attribute)
        if inner is None or id(wrapper) in self._tree.modules:
            return
        if id(inner) not in self._tree.modules and not self._watcher.stale:  # else it may have just been added
            return
        known = self._wrappers.setdefault(id(inner), [])
        if not any(each is wrapper for each in known):
            known.append(wrapper)
            self._watcher.follow_wrappers(self._called_wrappers())

    def _called_wrappers(self) -> Mapping[int, list[tuple[Any, Callable[[], None]]]]:
        """Return for each module its wrappers, and what to call before each of their calls."""
        return {
            module: [(wrapper, partial(self._adopt, module)) for wrapper in wrappers]
            for module, wrappers in self._wrappers.items()
        }

    def _adopt(self, module: int) -> None:
        """Move the hooks to the wrappers of a module, before the first of them runs."""
        if module not in self._compiled:
            self._compiled.add(module)
            self._attempt(self.refresh)

    def _attempt(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:
            self._failed(error)
