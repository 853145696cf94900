"""The recordings of a launched process: which taps are open, into which folders, and how they end."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensortap.capture import capture
from tensortap.capture.messages import say
from tensortap.capture.tap import Tap
from tensortap.core.interrupts import suppress_errors
from tensortap.core.urls import Place, as_place
from tensortap.errors import TensortapError
from tensortap.launch.command import environment_without
from tensortap.launch.options import parse_all
from tensortap.launch.series import numbered
from tensortap.launch.settings import LaunchSettings

__all__ = ["Recording", "Recordings"]


class Recording:
    """An open tap, its models and their optimizers."""

    def __init__(self, tap: Tap, roots: Sequence[Any], optimizers: Sequence[Any]) -> None:
        self.tap = tap
        self.roots = list(roots)
        self.optimizers = list(optimizers)
        self._steps = -1

    @property
    def inference(self) -> bool:
        return not self.optimizers

    def add_optimizer(self, optimizer: Any, instead_of: Sequence[Any]) -> None:
        """Count the steps of an optimizer that came later for the same models."""
        self.optimizers = [each for each in self.optimizers if not any(each is other for other in instead_of)]
        self.optimizers.append(optimizer)
        self.tap.add_optimizer(optimizer, instead_of)

    def is_idle(self) -> bool:
        """Return whether it has not stepped since this was asked before."""
        before, self._steps = self._steps, self.tap.stats()["steps"]
        return before == self._steps


class Recordings:
    """The recordings of one process, in the order in which they began."""

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self._options = parse_all(settings.options)
        self.opened: list[Recording] = []
        self.count = 0
        """Number of recordings so far, without discarded ones."""
        self._failed = False

    def knows(self, optimizer: Any) -> bool:
        """Return whether a recording counts the steps of an optimizer."""
        return self._failed or any(each is optimizer for recording in self.opened for each in recording.optimizers)

    def open(self, models: Mapping[str, Any], optimizers: Sequence[Any]) -> None:
        """Open a tap on models and their optimizers. A failure is reported, and the program continues without a tap."""
        if self._failed:
            return
        number = self.count + 1
        path = numbered(as_place(self._settings.out), number)
        for recording in self.opened:
            recording.tap.note(f"the program trains another model later, which is recorded into {path.name}")
        self._close_idle()
        try:
            tap = capture(_only(models), path, optimizer=_only(optimizers), **self._options)
        except TensortapError as error:
            self._failed = True
            say(f"nothing is recorded: {error}")
            return
        self.opened.append(Recording(tap, list(models.values()), optimizers))
        self.count = number
        if number > 1:
            tap.number(number)
        self._release_children()
        atexit.register(self.close_with_program)  # now, to come before the tap's own, which knows no error
        if multiprocessing.parent_process() is not None:  # such a process ends without `atexit`
            multiprocessing.util.Finalize(None, self.close_with_program, exitpriority=100)
        if tap.rank == 0:
            say(f"recording {_describe(models, optimizers)} into {_shown(path)}")

    def _close_idle(self) -> None:
        """Close earlier recordings that have ended, such as that of the previous fold: a tap keeps its model alive.

        A recording that stepped since the last one was opened may continue beside it.
        """
        for recording in [each for each in self.opened if each.is_idle()]:
            recording.tap.close()
            self.opened.remove(recording)

    def discard_inference(self) -> None:
        """Delete what was recorded before the first optimizer: it was a trial, not the training."""
        for recording in [each for each in self.opened if each.inference]:
            self.opened.remove(recording)
            self.count -= 1
            recording.tap.discard()

    def close(self, reason: str) -> None:
        """Close every tap; with a reason, as failed."""
        for recording in self.opened:
            recording.tap.close(*(("failed", reason) if reason else ("finished", "")))

    def close_with_program(self) -> None:
        """Close every tap because the program ends."""
        # Python keeps the exception that ended the program; a hook for exceptions would be visible to the program.
        error = getattr(sys, "last_value", None)
        with suppress_errors():
            self.close(f"{type(error).__name__}: {error}".removesuffix(": ") if error is not None else "")
        if isinstance(error, KeyboardInterrupt):
            # Python ends by SIGINT only if the last text that it executed was interrupted, and closing executes some.
            with suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")

    def _release_children(self) -> None:
        """Start later processes without the launch: they are helpers of this one, such as an evaluation."""
        plain = environment_without(os.environ)
        for name in set(os.environ) - set(plain):
            del os.environ[name]
        os.environ.update(plain)


def _only(values: Any) -> Any:
    """Return a single value for one, and None for none."""
    if len(values) > 1:
        return values
    return next(iter(values.values() if isinstance(values, Mapping) else values), None)


def _describe(models: Mapping[str, Any], optimizers: Sequence[Any]) -> str:
    if len(models) == 1:
        shown = type(next(iter(models.values()))).__name__
    else:
        shown = ", ".join(f"{name} ({type(model).__name__})" for name, model in models.items())
    return f"{shown}, trained by {', '.join(type(each).__name__ for each in optimizers)}" if optimizers else shown


def _shown(path: Place) -> Place:
    if not isinstance(path, Path):
        return path
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
