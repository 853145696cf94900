"""The console that pages are printed on."""

from __future__ import annotations

import os
from typing import IO

from rich.console import Console

__all__ = ["console", "without_escapes"]


def console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: no markup, no highlighting, no emoji codes.

    Rich drops colours alone for NO_COLOR, and keeps bold, dim and cursor movements. This console then takes its file
    for something other than a terminal, so nothing but text is printed, and progress bars are off.
    """
    plain = without_escapes()
    return Console(
        file=file,
        stderr=stderr,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=not stderr,  # pages are wrapped already; progress bars, on stderr, are cropped to the terminal
        force_terminal=False if plain else None,
        color_system=None if plain else "auto",
    )


def without_escapes() -> bool:
    """Return whether the environment asks for no escape codes: NO_COLOR is set, or TERM is dumb."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "unknown")
