"""Count micro steps: the forwards of a model that belong to its training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

from tensortap.capture.tree import Site
from tensortap.frameworks.base import Framework, Remove

__all__ = ["Listener", "MicroSteps", "Mode"]


class Mode(IntEnum):
    """How much of a training a forward is. The highest mode of a process is what it trains in."""

    INFERENCE = 0
    """Autograd is off."""
    EVALUATION = 1
    """Autograd is on, and the model is in evaluation mode."""
    TRAINING = 2


class Listener(Protocol):
    """Is called as forwards begin, before any hook of a module."""

    def begin(self, first: bool, mode: Mode) -> None:
        """A micro step begins. `first` if none began before it."""

    def restart(self) -> None:
        """Training begins after all: the micro steps so far were evaluation. `begin` follows."""

    def skip(self) -> None:
        """A forward begins that is evaluation and not a micro step."""


class MicroSteps:
    """Tells a listener of each micro step.

    The forward of the root is a micro step. If the root is never called, as in a pipeline that calls parts of the model
    or `model.forward`, the chosen module that ran first takes its place. A recomputation inside backward is not a micro
    step, and neither is a call of a module inside itself.

    A forward in a lower mode than one before it is evaluation: it is not a micro step. Until a forward in a higher mode
    comes, nobody knows that the process will train at all. So the micro steps up to then are taken back.
    """

    def __init__(self, framework: Framework, root: Site, listener: Listener) -> None:
        self._framework = framework
        self._root = root
        self._listener = listener
        self._mode: Mode | None = None
        """The highest mode so far."""
        self._pacer: str | None = None
        self._depth = 0
        self._skipping = False
        self._stand_ins: list[Remove] = []

    def watch(self, others: Sequence[Site], undo: ExitStack) -> None:
        """Place hooks on the root, and on the modules that may have to take its place."""
        undo.callback(self._dismiss)
        undo.callback(self._place(self._root))
        for site in others:
            if site.inside is None and site is not self._root:
                self._stand_ins.append(self._place(site))

    def evaluating(self) -> bool:
        """Whether the module that runs now is part of an evaluation."""
        if self._pacer == "" and not self._depth:  # a part of the model is called by itself
            return self._mode is not None and self._mode_now() < self._mode
        return self._skipping

    def _place(self, site: Site) -> Remove:
        return self._framework.on_call(site.module, partial(self._before, site.name), partial(self._after, site.name))

    def _dismiss(self) -> None:
        for remove in self._stand_ins:
            remove()
        self._stand_ins.clear()

    def _before(self, name: str, *_: Any) -> None:
        if self._framework.recomputing():
            return
        took_over = name == "" and self._pacer not in (None, "")
        if self._pacer is None or took_over:
            self._pacer, self._depth = name, 0
            if name == "":
                self._dismiss()
        if name == self._pacer:
            self._depth += 1
            if self._depth == 1:
                self._forward_begins(begun=took_over)

    def _forward_begins(self, begun: bool) -> None:
        """`begun` says that a part of the model, which was called before the model, has begun the micro step."""
        mode, highest = self._mode_now(), self._mode
        self._skipping = highest is not None and mode < highest
        if self._skipping:
            self._listener.skip()
            return
        self._mode = mode
        if highest is not None and mode > highest:
            self._listener.restart()
            self._listener.begin(True, mode)
        elif not begun:
            self._listener.begin(highest is None, mode)

    def _after(self, name: str, *_: Any) -> None:
        if name == self._pacer and self._depth and not self._framework.recomputing():
            self._depth -= 1

    def _mode_now(self) -> Mode:
        if not (self._framework.records_gradients() or self._framework.inside_function()):
            return Mode.INFERENCE
        return Mode.TRAINING if getattr(self._root.owner, "training", True) else Mode.EVALUATION
