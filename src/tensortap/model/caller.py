"""Find the line of user code that is running."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import FrameType

__all__ = ["caller"]

_PACKAGE = str(Path(__file__).parent.parent)
_LIBRARIES = tuple({str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages, also in the user's site or in another environment on the path."""


def caller() -> str:
    """Return file and line of the innermost frame of user code, or an empty string.

    The file is relative to the working folder. A file elsewhere is given by its name: users paste reports.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_library_code(file):
            return f"{_short_path(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@lru_cache(4096)
def _is_library_code(file: str) -> bool:
    return file.startswith((_PACKAGE, *_LIBRARIES, "<frozen")) or not _INSTALLED.isdisjoint(Path(file).parts)


def _short_path(file: str) -> str:
    if file.startswith("<"):
        return file
    path = Path(file)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path.name
