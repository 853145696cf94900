"""Finds the trained models of a program: modules that are called from outside and whose parameters an optimizer holds.

A teacher, a loss without parameters and an averaged copy hold no parameter of an optimizer, so they are not recorded.
A program without any optimizer is an inference, and the first model that it calls is recorded. If an optimizer comes
later, that recording is discarded, because the calls before it were a trial or a warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensortap.capture.messages import say
from tensortap.core.interrupts import raise_interrupt
from tensortap.frameworks.base import Framework, Remove
from tensortap.frameworks.discovery import Discovery
from tensortap.launch.names import names_of
from tensortap.launch.recording import Recordings

__all__ = ["Finder"]


class Finder:
    """The searches of one process, one for each framework that it imports."""

    def __init__(self, recordings: Recordings) -> None:
        self.recordings = recordings
        self._searches: list[_Search] = []

    def attach(self, framework: Framework) -> None:
        """Search for models of a framework; a framework that cannot report calls is skipped."""
        if hasattr(framework, "discovery"):
            self._searches.append(_Search(framework.discovery(), self.recordings))

    def stop(self) -> None:
        """Remove everything that was placed, except the taps."""
        for search in self._searches:
            search.stop()
        self._searches.clear()

    def forked(self) -> None:
        """Leave a forked process alone if its parent records: workers of a loader inherit the parent's objects."""
        if self.recordings.opened:
            self.stop()


class _Search:
    """The search for models of one framework."""

    def __init__(self, discovery: Discovery, recordings: Recordings) -> None:
        self._discovery = discovery
        self._recordings = recordings
        self._stop_optimizers = discovery.on_new_optimizer(self._guard(self._optimizer_made))
        self._stop_steps = discovery.on_step(self._guard(self._stepped))
        self._stop_calls: Remove | None = None
        self._begin()

    def stop(self) -> None:
        self._stop_optimizers()
        self._stop_steps()
        self._end()

    def _guard(self, callback: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return the callback with its errors reported: they must not end the program."""

        def guarded(found: Any) -> None:
            try:
                callback(found)
            except Exception as error:
                raise_interrupt(error)
                self.stop()
                say(f"the search for the trained model failed: {type(error).__name__}: {error}")

        return guarded

    def _begin(self) -> None:
        if self._stop_calls is None:
            self._stop_calls = self._discovery.on_outermost_call(self._guard(self._called))

    def _end(self) -> None:
        if self._stop_calls is not None:
            self._stop_calls()
            self._stop_calls = None

    def _optimizer_made(self, _: Any) -> None:
        self._begin()  # the optimizer is not complete yet: its class's __init__ is still running

    def _called(self, module: Any) -> None:
        optimizers = self._discovery.optimizers()
        if not optimizers:
            self._open_inference(module)
            return
        self._recordings.discard_inference()
        fresh = self._fresh(optimizers)
        parameters = self._discovery.parameters(module)
        if any(self._discovery.trained_by(optimizer) & parameters for optimizer in fresh):
            self._open(self._roots(module, fresh), fresh)
            fresh = self._fresh(optimizers)
        if not fresh:
            self._end()

    def _stepped(self, optimizer: Any) -> None:
        """Count the step of an optimizer that others seemed to replace, or record modules that no call has shown.

        A compiled function calls modules without a trace.
        """
        if fresh := self._fresh([optimizer]):
            self._recordings.discard_inference()
            if roots := self._discovery.outermost_with(self._discovery.trained_by(optimizer)):
                self._open(roots, fresh)

    def _fresh(self, optimizers: Sequence[Any]) -> list[Any]:
        """Return the optimizers that belong to no recording. One of a recorded model joins that recording."""
        fresh = []
        for optimizer in optimizers:
            if self._recordings.knows(optimizer):
                continue
            trained = self._discovery.trained_by(optimizer)
            for recording in self._recordings.opened:
                if any(trained & self._discovery.parameters(root) for root in recording.roots):
                    replaced = [each for each in recording.optimizers if trained & self._discovery.trained_by(each)]
                    recording.add_optimizer(optimizer, replaced)
                    break
            else:
                fresh.append(optimizer)
        return fresh

    def _roots(self, module: Any, optimizers: Sequence[Any]) -> list[Any]:
        """Return the modules to tap: the called one, and those with the remaining parameters of the optimizers.

        If the called module is a part of one that holds more of them, as of a LightningModule whose training step
        calls its parts, that one is the root.
        """
        trained = {each for optimizer in optimizers for each in self._discovery.trained_by(optimizer)}
        own = self._discovery.parameters(module) & trained
        if own == trained:
            return [module]
        first = next(
            (outer for outer in self._discovery.ancestors(module) if self._discovery.parameters(outer) & trained > own),
            module,
        )
        roots, missing = [first], trained - self._discovery.parameters(first)
        for outer in self._discovery.outermost_with(missing):
            if found := self._discovery.parameters(outer) & missing:
                roots.append(outer)
                missing -= found
        return roots

    def _open(self, roots: Sequence[Any], optimizers: Sequence[Any]) -> None:
        held = [self._discovery.parameters(root) for root in roots]
        own = [each for each in optimizers if any(self._discovery.trained_by(each) & parameters for parameters in held)]
        self._recordings.open(names_of(roots), own)

    def _open_inference(self, module: Any) -> None:
        if not self._recordings.opened and self._discovery.parameters(module):
            self._recordings.open(names_of(self._discovery.ancestors(module)[:1]), [])
            self._end()  # until an optimizer is made
