"""Every error that tensortap raises on purpose.

    TensortapError (Exception)
    ├── UsageError          (ValueError)         an argument is wrong
    ├── RunNotFound         (FileNotFoundError)  there is no run at the path
    ├── RunExists           (FileExistsError)    there is a run already, and overwrite is off
    ├── RunUnreadable       (ValueError)         not a run, damaged, or written by a newer version
    ├── StoreWriteError     (OSError)            a full or read-only disk, a missing folder, max_memory reached
    ├── CaptureError        (RuntimeError)       the tap had to stop
    ├── NonfiniteError      (ArithmeticError)    a NaN or Inf was born, and capture(on_nonfinite="stop") was given
    └── MissingDependency   (ImportError)        an optional package is needed

Each class also derives from the builtin in parentheses, so code that does not know tensortap can catch it. A message
states what happened to which file or name, why, and what to do. A mismatch between runs is a result, not an exception.
No message holds a credential: `scrub` removes those of URLs and of the environment.
"""

from __future__ import annotations

import os
import re

__all__ = [
    "CaptureError",
    "MissingDependency",
    "NonfiniteError",
    "RunExists",
    "RunNotFound",
    "RunUnreadable",
    "StoreWriteError",
    "TensortapError",
    "UsageError",
    "scrub",
    "shorten",
]

_LONGEST = 2000
"""Characters of a message. A file may hold names of any length."""
_USER = re.compile(r"(?<=://)(?![^\s/:@]+:\d{1,5}(?:/|$))[^\s/@:]*:[^\s\"'<>]*@")
"""A name and a password in front of a host. The lookahead excludes ports."""
_QUERY = re.compile(r"(?P<url>\b[A-Za-z][A-Za-z0-9+.\-]*://[^\s?'\"<>]*)\?[^\s'\"<>]+")
_SECRET_VARIABLE = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|CONNECTION_STRING|SAS|API_?KEY|ACCESS_KEY|ACCOUNT_KEY")
_SHORTEST_SECRET = 8


def shorten(text: str, longest: int = 200) -> str:
    """Return the text without its middle if it is longer than `longest` characters.

    >>> shorten("layers.0.fc1.weight", 11)
    'layer…eight'
    """
    if len(text) <= longest:
        return text
    head = longest // 2
    return f"{text[:head]}…{text[len(text) - (longest - head - 1) :]}"


def scrub(text: str) -> str:
    """Return the text without passwords and queries of URLs, and without secrets of this process's environment.

    >>> scrub("s3://key:secret@bucket/runs/a?X-Amz-Signature=1234 cannot be read")
    's3://***@bucket/runs/a?*** cannot be read'
    """
    for value in _secrets():
        text = text.replace(value, "***")
    if "://" not in text:
        return text
    return _QUERY.sub(r"\g<url>?***", _USER.sub("***@", text))


def _secrets() -> list[str]:
    """Return the values of environment variables that hold credentials, the longest first."""
    found = {value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name.upper())}
    secret = [value for value in found if len(value) >= _SHORTEST_SECRET and not os.path.exists(value)]  # noqa: PTH110
    return sorted(secret, key=len, reverse=True)


class TensortapError(Exception):
    """The base class. Its message is bounded, whatever a damaged file contributed to it, and holds no credentials."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(shorten(scrub(each), _LONGEST) if isinstance(each, str) else each for each in args))


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


class NonfiniteError(TensortapError, ArithmeticError):
    """A NaN or Inf was born in a step, and `capture(on_nonfinite="stop")` asked to stop. The run is written."""


class MissingDependency(TensortapError, ImportError):
    """This call needs an optional package."""
