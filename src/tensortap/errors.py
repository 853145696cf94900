"""Every error that tensortap raises on purpose.

    TensortapError (Exception)
    ├── UsageError          (ValueError)         an argument is wrong
    ├── RunNotFound         (FileNotFoundError)  there is no run at the path
    ├── RunExists           (FileExistsError)    there is a run already, and overwrite is off
    ├── RunUnreadable       (ValueError)         not a run, damaged, or written by a newer version
    ├── StoreWriteError     (OSError)            a full or read-only disk, a missing folder, max_memory reached
    ├── CaptureError        (RuntimeError)       the tap had to stop
    └── MissingDependency   (ImportError)        an optional package is needed

Each class also derives from the builtin in parentheses, so code that does not know tensortap can catch it. A message
states what happened to which file or name, why, and what to do. A mismatch between runs is a result, not an exception.
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
]


class TensortapError(Exception):
    """The base of them all."""


class UsageError(TensortapError, ValueError):
    """An argument is wrong; the message names the accepted values."""


class RunNotFound(TensortapError, FileNotFoundError):
    """There is no run at the path."""


class RunExists(TensortapError, FileExistsError):
    """There is a run at the path already. Pass overwrite to replace it."""


class RunUnreadable(TensortapError, ValueError):
    """Not a run, a damaged run, or one written by a newer version."""


class StoreWriteError(TensortapError, OSError):
    """A file could not be written: disk full, no permission, folder missing, max_memory reached."""


class CaptureError(TensortapError, RuntimeError):
    """The tap had to stop. The training step itself is unaffected."""


class MissingDependency(TensortapError, ImportError):
    """This call needs an optional package."""
