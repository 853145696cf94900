"""Records the results of the operators of chosen modules, forward and backward."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.modules.tree import Site
from tensortap.capture.selection import Selection
from tensortap.capture.watching.clock import ModuleCall
from tensortap.core.operator_paths import OperatorPath
from tensortap.core.operators import SourceLine
from tensortap.frameworks.base import Framework, Remove
from tensortap.frameworks.operators import Guard, OperatorWatch, Sent, tracer_of

__all__ = ["OperatorRecords"]

_COMPILED = 'its operators are not recorded: they run in a compiled graph; compiled="eager" runs them uncompiled'


@dataclass(slots=True, eq=False)
class _OpenCall:
    """A call in progress. Its operators are those of its own code, not of the modules that it calls."""

    site: Site
    call: ModuleCall
    wanted: bool
    counts: Counter[OperatorPath] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class _Thread:
    """A thread that calls modules: its calls in progress, and the watch that reports its operators."""

    watch: OperatorWatch
    open: list[_OpenCall] = field(default_factory=list)


class OperatorRecords:
    """Follows the calls of modules, and watches operators while the innermost one is a chosen module."""

    def __init__(self, framework: Framework, selection: Selection, book: CoverageBook, gradients: bool) -> None:
        """`gradients`: whether operators of backward are recorded, too."""
        self._framework = framework
        self._selection = selection
        self._book = book
        self._gradients = gradients
        self._threads: dict[int, _Thread] = {}
        """By the thread's number, because a framework reports only the operators of one thread."""
        self.record: Callable[[Site, ModuleCall, str, str, Any], None] = lambda *_: None
        """Records a tensor of a site's call: phase, path, tensor."""
        self.hold: Callable[[Remove], None] = lambda _: None
        """Keeps a hook until the step ends."""

    def use(self, guard: Guard) -> None:
        """Set the guard of all callbacks."""
        self._on_sent = guard(self._sent)
        self._guard = guard

    def note_compiled(self, sites: Sequence[Site]) -> None:
        """Report the chosen modules whose operators no watch can see."""
        for site in sites:
            if self._selection.wants_operators(site.name) and (site.compiled or site.inside is not None):
                self._book.remark(site.name, _COMPILED)

    def entered(self, site: Site, call: ModuleCall) -> None:
        wanted = self._selection.wants_operators(site.name)
        if wanted and site.compiled:
            self._book.remark(site.name, _COMPILED)
            wanted = False
        thread = self._thread()
        thread.open.append(_OpenCall(site, call, wanted))
        _update(thread)

    def left(self, call: ModuleCall | None) -> None:
        """End a call, with those inside whose end an exception skipped."""
        thread = self._thread()
        if any(each.call is call for each in thread.open):
            while thread.open.pop().call is not call:
                pass
        _update(thread)

    def end_step(self) -> None:
        """Stop, also after an interrupt that no hook saw."""
        for thread in self._threads.values():
            thread.open.clear()
            thread.watch.stop()
        self._threads.clear()

    def _thread(self) -> _Thread:
        """Return the thread that is running."""
        number = threading.get_ident()
        if number not in self._threads:
            watch = tracer_of(self._framework).operator_watch(self._ran, self._hold, self._guard)
            self._threads[number] = _Thread(watch)
        return self._threads[number]

    def _hold(self, remove: Remove) -> None:
        self.hold(remove)

    def _ran(self, name: str, line: SourceLine | None, tensors: Sequence[Any]) -> Sent | None:
        """Record the results of an operator."""
        here = self._threads[threading.get_ident()].open[-1]
        operator = OperatorPath(name, "" if line is None else str(line))
        here.counts[operator] += 1
        operator = operator._replace(nth=here.counts[operator])
        if not here.call.recomputed:
            for index, tensor in enumerate(tensors):
                self.record(here.site, here.call, "forward", str(operator._replace(part=index)), tensor)
        return partial(self._on_sent, here.site, here.call, operator) if self._gradients else None

    def _sent(self, site: Site, call: ModuleCall, operator: OperatorPath, gradients: Sequence[Any]) -> None:
        """Record the gradients that the backward of an operator has computed, one for each operand."""
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                path = operator._replace(part=index, gradient=True)
                self.record(site, call, "backward", str(path), gradient)


def _update(thread: _Thread) -> None:
    """Watch operators while the innermost module is a chosen one.

    The last operator of the outer module is complete before the inner module runs, and vice versa.
    """
    thread.watch.stop()
    if thread.open and thread.open[-1].wanted:
        thread.watch.start()
