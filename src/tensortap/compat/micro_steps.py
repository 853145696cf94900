"""When a micro step begins: with each forward of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from tensortap.capture.tree import Site
from tensortap.frameworks.base import Framework, Remove

__all__ = ["MicroSteps"]


class MicroSteps:
    """Calls `begin(first)` as each micro step begins.

    The root's forward sets the pace. Where the root is never called, as in a pipeline, which calls its parts one by one
    or their `forward`, the chosen module that ran first does. A recomputation inside backward begins nothing, and
    neither does a module that calls itself.
    """

    def __init__(self, framework: Framework, begin: Callable[[bool], None]) -> None:
        self._framework = framework
        self._begin = begin
        self._pacer: str | None = None
        self._depth = 0
        self._stand_ins: list[Remove] = []

    def watch(self, root: Site, others: Sequence[Site], undo: ExitStack) -> None:
        undo.callback(self._dismiss)
        undo.callback(self._place(root))
        for site in others:
            if site.inside is None and site is not root:
                self._stand_ins.append(self._place(site))

    def _place(self, site: Site) -> Remove:
        return self._framework.on_call(site.module, partial(self._before, site.name), partial(self._after, site.name))

    def _dismiss(self) -> None:
        for remove in self._stand_ins:
            remove()
        self._stand_ins.clear()

    def _before(self, name: str, *_: Any) -> None:
        if self._framework.replaying():
            return
        first = self._pacer is None
        if first or (name == "" and self._pacer != ""):
            begun = not first  # by a part of the model that was called before the model itself
            self._pacer, self._depth = name, 0
            if name == "":
                self._dismiss()
            if begun:
                self._depth = 1
                return
        if name != self._pacer:
            return
        self._depth += 1
        if self._depth == 1:
            self._begin(first)

    def _after(self, name: str, *_: Any) -> None:
        if name == self._pacer and self._depth and not self._framework.replaying():
            self._depth -= 1
