"""Every error that tensortap raises on purpose.

    TensortapError
    ├── UsageError          (ValueError)         an argument that cannot be meant
    ├── RunNotFound         (FileNotFoundError)  no run at that path
    ├── RunExists           (FileExistsError)    a run is there already and overwrite is off
    ├── RunUnreadable       (ValueError)         not a run, damaged, or of a newer format
    ├── StoreWriteError     (OSError)            the disk is full, read-only, gone; or a run in memory is full
    ├── CaptureError        (RuntimeError)       the tap had to stop
    └── MissingDependency   (ImportError)        an optional package is needed

Each is also the builtin beside it, so code that knows nothing of tensortap can catch it. A message says what
happened, to which file or name, and what to do next. A mismatch between runs is a result, never an exception.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "MissingDependency",
    "RunExists",
    "RunNotFound",
    "RunUnreadable",
    "StoreWriteError",
    "TensortapError",
    "UsageError",
    "shorten",
]

_LONGEST = 2000
"""Characters of a message. A file may hold names of any length."""


def shorten(text: str, longest: int = 200) -> str:
    """Return the text without its middle if it is longer than `longest` characters.

    >>> shorten("layers.0.fc1.weight", 11)
    'layer…eight'
    """
    if len(text) <= longest:
        return text
    head = longest // 2
    return f"{text[:head]}…{text[len(text) - (longest - head - 1) :]}"


class TensortapError(Exception):
    """The base class. Its message is bounded, whatever a damaged file contributed to it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(shorten(each, _LONGEST) if isinstance(each, str) else each for each in args))


class UsageError(TensortapError, ValueError):
    """An argument that cannot be meant."""


class RunNotFound(TensortapError, FileNotFoundError):
    """No run at that path."""


class RunExists(TensortapError, FileExistsError):
    """A run is there already, and it is not overwritten without being told to."""


class RunUnreadable(TensortapError, ValueError):
    """Not a run, a damaged one, or one of a newer format."""


class StoreWriteError(TensortapError, OSError):
    """The run could not be written: disk full, no permission, folder gone, max_memory used up."""


class CaptureError(TensortapError, RuntimeError):
    """The tap had to stop; the training step was left as it was."""


class MissingDependency(TensortapError, ImportError):
    """An optional package is needed for this call."""
