"""Ends the `tensortap` command in one line if it is interrupted while Python still imports it.

The package imports this first. In a program that uses the library, nothing happens here.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

__all__ = ["INTERRUPTED", "end_startup"]

INTERRUPTED = 130
"""The exit code of an interrupted command."""


def end_startup() -> None:
    """Let an interrupt raise KeyboardInterrupt again: from now on the command handles it."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(*_: object) -> None:
    # No exception: an import may swallow one, and the interpreter prints its traceback. No file is open yet.
    os.write(2, b"tensortap: interrupted\n")
    os._exit(INTERRUPTED)


def _is_command() -> bool:
    """Return whether this process runs `tensortap` or `python -m tensortap`, which has the name -m until it begins."""
    program = (sys.argv or [""])[0]
    if program == "-m":
        options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
        return options[-2:] == ["-m", "tensortap"] or options[-1:] == ["-mtensortap"]
    return os.path.basename(program) in ("tensortap", "tensortap.exe")  # noqa: PTH119  pathlib is slow to import


if signal.getsignal(signal.SIGINT) is signal.default_int_handler and _is_command():
    with suppress(ValueError):  # not in the main thread, so the command has begun
        signal.signal(signal.SIGINT, _interrupted)
