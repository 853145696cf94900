"""Count micro steps: the forwards of a model that are part of its training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

from tensortap.capture.modules.tree import Site
from tensortap.frameworks.base import Framework, Remove

__all__ = ["ForwardMode", "MicroStepListener", "MicroSteps"]


class ForwardMode(IntEnum):
    """The mode of a forward. The highest mode of a process is the one that it trains in."""

    INFERENCE = 0
    """Autograd is off."""
    EVALUATION = 1
    """Autograd is on, and the model is in evaluation mode."""
    TRAINING = 2


class MicroStepListener(Protocol):
    """Callbacks at the start of forwards, before any hook of a module."""

    def begin(self, first: bool, mode: ForwardMode) -> None:
        """Begin a micro step; `first` if it is the first one."""

    def restart(self) -> None:
        """Discard the micro steps so far: they were evaluation, and training begins now. `begin` follows."""

    def skip(self) -> None:
        """Skip a forward that is evaluation, not a micro step."""


class MicroSteps:
    """Reports each micro step to a listener.

    The forward of the root is a micro step. If the root is never called, as in a pipeline that calls parts of the model
    or `model.forward`, the selected module that ran first takes its place. A recomputation inside backward is not a
    micro step, and neither is a call of a module inside itself.

    A forward in a lower mode than an earlier one is evaluation, not a micro step. Before the first forward in a higher
    mode, it is unknown whether the process will train, so that forward discards the micro steps up to then.
    """

    def __init__(self, framework: Framework, root: Site, listener: MicroStepListener) -> None:
        self._framework = framework
        self._root = root
        self._listener = listener
        self._mode: ForwardMode | None = None
        """The highest mode so far; None before the first forward."""
        self._counted_module: str | None = None
        self._depth = 0
        self._skipping = False
        self._substitutes: list[Remove] = []

    def watch(self, others: Sequence[Site], undo: ExitStack) -> None:
        """Place hooks on the root, and on the modules that may take its place."""
        undo.callback(self._remove_substitutes)
        undo.callback(self._place(self._root))
        for site in others:
            if site.inside is None and site is not self._root:
                self._substitutes.append(self._place(site))

    def evaluating(self) -> bool:
        """Return whether the running module is part of an evaluation."""
        if self._counted_module == "" and not self._depth:  # a part of the model is called directly
            return self._mode is not None and self._mode_now() < self._mode
        return self._skipping

    def _place(self, site: Site) -> Remove:
        return self._framework.on_call(site.module, partial(self._before, site.name), partial(self._after, site.name))

    def _remove_substitutes(self) -> None:
        for remove in self._substitutes:
            remove()
        self._substitutes.clear()

    def _before(self, name: str, *_: Any) -> None:
        if self._framework.recomputing():
            return
        root_takes_over = name == "" and self._counted_module not in (None, "")
        if self._counted_module is None or root_takes_over:
            self._counted_module, self._depth = name, 0
            if name == "":
                self._remove_substitutes()
        if name == self._counted_module:
            self._depth += 1
            if self._depth == 1:
                self._forward_begins(already_begun=root_takes_over)

    def _forward_begins(self, already_begun: bool) -> None:
        """Begin or skip a micro step. `already_begun` if a part of the model, called before the model, began it."""
        mode, highest = self._mode_now(), self._mode
        self._skipping = highest is not None and mode < highest
        if self._skipping:
            self._listener.skip()
            return
        self._mode = mode
        if highest is not None and mode > highest:
            self._listener.restart()
            self._listener.begin(True, mode)
        elif not already_begun:
            self._listener.begin(highest is None, mode)

    def _after(self, name: str, *_: Any) -> None:
        if name == self._counted_module and self._depth and not self._framework.recomputing():
            self._depth -= 1

    def _mode_now(self) -> ForwardMode:
        if not (self._framework.records_gradients() or self._framework.inside_function()):
            return ForwardMode.INFERENCE
        return ForwardMode.TRAINING if getattr(self._root.owner, "training", True) else ForwardMode.EVALUATION
