"""The line of the user's code that is running."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import FrameType

__all__ = ["caller"]

_OURS = str(Path(__file__).parent.parent)
_LIBRARIES = tuple({str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages, also those of a user or of another environment on the path."""


def caller() -> str:
    """Return file and line of the innermost frame that is neither ours nor a library's; empty if there is none.

    The file is relative to the working folder, or its name alone if it lies elsewhere: reports get pasted.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _foreign(file):
            return f"{_shown(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@lru_cache(4096)
def _foreign(file: str) -> bool:
    return file.startswith((_OURS, *_LIBRARIES, "<frozen")) or not _INSTALLED.isdisjoint(Path(file).parts)


def _shown(file: str) -> str:
    if file.startswith("<"):
        return file
    path = Path(file)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path.name
