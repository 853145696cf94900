"""The taps of one callback: one for each fit, each into a folder of its own."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from tensortap.capture import capture
from tensortap.capture.tap import Tap
from tensortap.errors import UsageError

__all__ = ["FitRecorder", "Fits"]

_OWN = {"model", "path", "optimizer"}
"""Parameters of `capture` that the trainer supplies."""


class Fits:
    """Opens a tap at the start of a fit and closes it at the end, also after an exception.

    The first fit records into `path`, the second into path-2. Without a path, each run is in memory.
    """

    def __init__(self, path: str | Path | None, options: dict[str, Any]) -> None:
        known = set(inspect.signature(capture).parameters) - _OWN
        if unknown := set(options) - known:
            raise UsageError(f"{', '.join(sorted(unknown))}: capture has no such option; there are {_listed(known)}")
        self._path = None if path is None else Path(path)
        self._options = options
        self._count = 0
        self._open = False
        self.tap: Tap | None = None
        """The tap of the current fit, or of the last one."""

    def begin(self, model: Any, optimizer: Any, done: int = 0) -> None:
        """Open a tap. `done` is the number of steps that the training had before, if it is resumed."""
        self.end("the trainer did not report the end of the fit")
        path = self._path
        if path is not None and self._count:
            path = path.with_name(f"{path.name}-{self._count + 1}")
        self.tap = capture(model, path, optimizer=optimizer, **self._options)
        self._count += 1
        self._open = True
        if done:
            self.tap.note(f"the training was resumed: step 0 of this run is step {done} of the training")

    def end(self, failure: str = "") -> None:
        """Close the tap of the current fit, if there is one; as failed if there is a reason."""
        if self._open and self.tap is not None:
            self._open = False
            self.tap.close(*(("failed", failure) if failure else ("finished", "")))

    def fail(self, error: BaseException) -> None:
        """Close the tap of the current fit because of an exception."""
        self.end(f"{type(error).__name__}: {error}".removesuffix(": "))


class FitRecorder:
    """The common base of the callbacks of all trainers. A class lists it before the trainer's own base class."""

    def __init__(self, path: str | Path | None = None, **options: Any) -> None:
        super().__init__()
        self._fits = Fits(path, options)

    @property
    def tap(self) -> Tap | None:
        """The tap of the current or the last fit; `tap.run` is its run."""
        return self._fits.tap


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
