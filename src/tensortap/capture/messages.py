"""Messages to the user of a training, where an exception or a Python warning could end it."""

from __future__ import annotations

import sys

from tensortap.core.interrupts import suppress_errors

__all__ = ["say"]


def say(text: str) -> None:
    """Write one line to stderr, and ignore a stream that is closed or missing.

    This is not a Python warning, because `-W error` turns those into exceptions.
    """
    with suppress_errors():
        sys.stderr.write(f"tensortap: {' '.join(text.split())}\n")
        sys.stderr.flush()
