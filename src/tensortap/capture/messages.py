"""Messages to the person who runs a training, where an exception or a Python warning could end it."""

from __future__ import annotations

import sys

from tensortap.core.interrupts import suppress_errors

__all__ = ["say"]


def say(text: str) -> None:
    """Write one line to stderr. A stream that is closed or missing is no reason to fail.

    A Python warning would not do: `-W error` turns it into an exception.
    """
    with suppress_errors():
        sys.stderr.write(f"tensortap: {' '.join(text.split())}\n")
        sys.stderr.flush()
