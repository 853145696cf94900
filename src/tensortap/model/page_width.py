"""Widths of the reports that models print."""

from __future__ import annotations

import os
import shutil

__all__ = ["page_width", "terminal_width"]


def page_width() -> int:
    """Return the width of text made without a terminal: COLUMNS if it is set to 40 or more, else 80."""
    width = os.environ.get("COLUMNS", "")
    return int(width) if width.isdecimal() and int(width) >= 40 else 80


def terminal_width(least: int) -> int:
    """Return the width of the terminal, or 80 without one, but at least `least`."""
    return max(least, shutil.get_terminal_size((80, 24)).columns)
