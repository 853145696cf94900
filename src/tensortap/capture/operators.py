"""Records what the operators of chosen modules compute, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensortap.capture.clock import ModuleCall
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.selection import Selection
from tensortap.capture.tree import Site
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


class OperatorRecords:
    """Follows the calls of modules, and watches operators while the innermost one is a chosen module."""

    def __init__(self, framework: Framework, selection: Selection, book: CoverageBook, gradients: bool) -> None:
        """`gradients`: whether those of backward are recorded, too."""
        self._framework = framework
        self._selection = selection
        self._book = book
        self._gradients = gradients
        self._open: list[_OpenCall] = []
        self._watch: OperatorWatch | None = None
        self.record: Callable[[Site, ModuleCall, str, str, Any], None] = lambda *_: None
        """Records a tensor of a site's call: phase, path, tensor."""
        self.hold: Callable[[Remove], None] = lambda _: None
        """Keeps a hook until the step ends."""

    def use(self, guard: Guard) -> None:
        """Take the guard of all callbacks."""
        self._on_sent = guard(self._sent)
        self._watch = tracer_of(self._framework).operator_watch(self._ran, lambda remove: self.hold(remove), guard)

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
        self._open.append(_OpenCall(site, call, wanted))
        self._update()

    def left(self, call: ModuleCall | None) -> None:
        """End a call, with those inside whose end an exception skipped."""
        if any(each.call is call for each in self._open):
            while self._open.pop().call is not call:
                pass
        self._update()

    def end_step(self) -> None:
        """Stop, also after an interrupt that no hook saw."""
        self._open.clear()
        self._update()

    def _update(self) -> None:
        if self._watch is None:
            return
        # What the outer module computed last is complete before the inner one runs, and the other way round.
        self._watch.stop()
        if self._open and self._open[-1].wanted:
            self._watch.start()

    def _ran(self, name: str, line: SourceLine | None, tensors: Sequence[Any]) -> Sent | None:
        """Record the results of an operator."""
        here = self._open[-1]
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
