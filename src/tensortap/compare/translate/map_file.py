"""A list of names that belong together: a line 'candidate name = reference name' for each."""

from __future__ import annotations

import os
from pathlib import Path

from tensortap.errors import RunNotFound, RunUnreadable, UsageError

__all__ = ["read_map"]


def read_map(path: str | os.PathLike[str] | None) -> dict[str, str] | None:
    """The candidate's names and what the reference calls them; None without a file."""
    if path is None:
        return None
    try:
        lines = Path(path).read_text().splitlines()
    except FileNotFoundError as error:
        raise RunNotFound(f"there is no map file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RunUnreadable(f"the map file {path} cannot be read: {error}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, equals, other = line.partition("=")
            if not equals:
                raise UsageError(
                    f"{path}, line {number}: write 'candidate name = reference name', not {line.strip()!r}"
                )
            found[name.strip()] = other.strip()
    return found
