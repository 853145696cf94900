"""The hooks on modules: placed, removed for a while, and kept up to date while the model changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tensortap.frameworks.base import AfterCall, BeforeCall, Framework, Remove
from tensortap.frameworks.hooks import RepeatableHooks

__all__ = ["HookedModule", "ModuleHooks"]


@dataclass(frozen=True, slots=True, eq=False)
class HookedModule:
    """A module that is hooked, and the callbacks of its hooks."""

    name: str
    """Its structural name; the root is the empty string."""
    module: Any
    before: BeforeCall
    after: AfterCall


class ModuleHooks:
    """The hooks of one observer on modules. Those on the root stay until it is known that the run trains."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._wanted: dict[tuple[str, int], HookedModule] = {}
        self._placed: dict[tuple[str, int], tuple[bool, Remove]] = {}
        """For each module: whether it was compiled when its hooks were placed, and the function that removes them."""
        self._detached: dict[tuple[str, int], tuple[bool, RepeatableHooks]] = {}
        """The same for hooks that are removed for a while."""
        self._attached = True

    def update(self, wanted: Iterable[HookedModule]) -> None:
        """Place missing hooks, and remove those that are no longer wanted. A module that was compiled in place needs
        other hooks than before."""
        self._wanted = {(each.name, id(each.module)): each for each in wanted}
        self._detached.clear()
        for key, (compiled, _) in list(self._placed.items()):
            if key not in self._wanted or self._framework.compiled(self._wanted[key].module) != compiled:
                self._placed.pop(key)[1]()
        self._place()

    def attach(self) -> None:
        """Place the hooks that are not there."""
        if not self._attached:
            self._attached = True
            self._place()

    def detach(self, with_root: bool) -> None:
        """Remove the hooks, those on the root only if asked to: even a hook that does nothing takes microseconds."""
        self._attached = False
        for key in [key for key in self._placed if with_root or key[0] != ""]:
            compiled, remove = self._placed.pop(key)
            remove()
            if isinstance(remove, RepeatableHooks):
                self._detached[key] = compiled, remove

    def remove(self) -> None:
        """Remove all hooks."""
        self._wanted = {}
        self._detached.clear()
        while self._placed:
            self._placed.popitem()[1][1]()

    def _place(self) -> None:
        for key, each in self._wanted.items():
            if key not in self._placed and (self._attached or each.name == ""):
                compiled = self._framework.compiled(each.module)
                before, hooks = self._detached.pop(key, (compiled, None))
                if hooks is None or before != compiled or not hooks.place_again():
                    self._placed[key] = compiled, self._framework.on_call(each.module, each.before, each.after)
                else:
                    self._placed[key] = compiled, hooks
