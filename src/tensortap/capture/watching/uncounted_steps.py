"""Detects a training loop whose steps are not counted, so that all of it is recorded as one step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.messages import say
from tensortap.capture.modules.tree import Tree
from tensortap.capture.watching.clock import Clock
from tensortap.core.interrupts import suppress_errors
from tensortap.core.records import GRADIENT_KINDS
from tensortap.frameworks.base import Framework

__all__ = ["UncountedSteps"]

_LARGEST = 4096
"""Upper bound on the elements of a parameter that is copied."""
_PARAMETERS = 4
_LEAST = 2
_LEAST_WITH_OPTIMIZER = 16
"""Forwards before the first line about it. A step of an optimizer may take several, each with other parameters: SAM."""


class UncountedSteps:
    """Copies of a few small parameters from the start of the first and of the last forward.

    Values are compared, since fused optimizers and paddle's do not count versions. The copies stay on their device.
    Comparing them makes the device wait, so it happens at the second forward, the fourth, the eighth and so on, and at
    the end. Only a tap's first step is watched: a second one proves counting.
    """

    def __init__(
        self, framework: Framework, tree: Tree, clock: Clock, book: CoverageBook, kinds: Collection[str]
    ) -> None:
        self._framework = framework
        self._owners = [site.owner for site in tree.sites]
        self._clock = clock
        self._book = book
        self._sees_gradients = not set(GRADIENT_KINDS).isdisjoint(kinds)
        self._watched: Sequence[Any] = ()
        self._first: Sequence[Any] = ()
        self._last: Sequence[Any] = ()
        self._forwards = 0
        self._backward = False
        self._told = False
        self._least = _LEAST
        self._counted = False

    def expect_optimizer(self) -> None:
        """Take note that steps of an optimizer are counted, if it steps."""
        self._least = _LEAST_WITH_OPTIMIZER

    def optimizer_begins(self) -> None:
        """Take note of a step of an optimizer: steps are counted. Forwards inside of it belong to it, as with LBFGS."""
        self._counted = True
        self.release()

    def forward_begins(self) -> None:
        """Take note of a micro step that begins."""
        if self._clock.step or self._counted:
            self.release()
        elif self._framework.records_gradients():
            self._forwards += 1
            if self._told:
                return
            with suppress_errors():  # a tensor that cannot be copied must not stop the tap
                self._copy()
            if self._forwards >= self._least and not self._forwards & (self._forwards - 1) and self._uncounted():
                self._told = True
                self.release()
                say(
                    "the parameters changed, but no step was counted: all forwards are recorded as one step; "
                    "pass optimizer= to capture, or call tap.step() after each step"
                )

    def _copy(self) -> None:
        if self._forwards == 1:
            self._watched = self._small()
            self._first = [self._framework.copy(tensor) for tensor in self._watched]
            return
        if not any(map(self._framework.unreadable, self._watched)):  # as while a CUDA graph is being captured
            self._last = [self._framework.copy(tensor) for tensor in self._watched]
            self._backward = self._book.any_gradient

    def _small(self) -> list[Any]:
        """Return a few of the smallest trained parameters."""
        framework = self._framework
        found = {
            id(tensor): (prod(tensor.shape), tensor)
            for _, _, tensor in framework.parameters_of(self._owners)
            if framework.requires_gradient(tensor) and not framework.unreadable(tensor)
        }
        small = sorted((each for each in found.values() if 0 < each[0] <= _LARGEST), key=lambda each: each[0])
        return [tensor for _, tensor in small[:_PARAMETERS]]

    def release(self) -> None:
        self._watched = self._first = self._last = ()

    def notice(self) -> str:
        """Return the notice for a closing tap; "" if the parameters stayed, as in gradient accumulation."""
        if self._clock.step or self._counted or not (self._told or self._uncounted()):
            return ""
        return (
            f"the parameters changed between the {self._forwards} forwards that were recorded as one step, as if each "
            "were a training step: pass optimizer= to capture, or call tap.step() after each step"
        )

    def _uncounted(self) -> bool:
        # If no gradient is recorded, backward is not seen, and a single change may have been a load.
        if not self._backward if self._sees_gradients else self._forwards < 3:
            return False
        return self._changed()

    def _changed(self) -> bool:
        with suppress_errors():
            host = self._framework.host
            pairs = zip(self._first, self._last, strict=False)
            return any(host(first).tobytes() != host(last).tobytes() for first, last in pairs)
        return False
