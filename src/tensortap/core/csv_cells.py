"""Names in CSV files. A spreadsheet runs a cell that begins with = + - or @ as a formula, so such a cell gets a ' in
front. A cell that begins with ' gets another one: `unguarded` gives every name back.
"""

from __future__ import annotations

import re

__all__ = ["GUARDED", "guarded", "unguarded"]

GUARDED = "^[=+\\-@'\\x00-\\x1f\\x7f\uff1d\uff0b\uff0d\uff20]"
"""Matches text that needs a guard. Some spreadsheets skip control characters or read full-width signs as plain ones."""

_pattern = re.compile(GUARDED)


def guarded(text: str) -> str:
    """Return the text as a cell that a spreadsheet shows and does not run.

    >>> guarded("=1+1"), guarded("layers.0"), guarded("'s")
    ("'=1+1", 'layers.0', "''s")
    """
    return f"'{text}" if _pattern.match(text) else text


def unguarded(cell: str) -> str:
    """Return the text that `guarded` was given.

    >>> unguarded("'=1+1"), unguarded("layers.0")
    ('=1+1', 'layers.0')
    """
    return cell[1:] if cell.startswith("'") else cell
