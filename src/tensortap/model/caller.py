"""Which line of the user's code we are in."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

__all__ = ["caller"]

_OURS = str(Path(__file__).parent.parent)
_LIBRARIES = tuple({str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def caller() -> str:
    """File and line of the innermost frame that is neither ours nor a library's; empty if there is none.

    The file is written as seen from the working folder, and by its name alone if it lies elsewhere: reports get pasted.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, *_LIBRARIES, "<frozen")):
            return f"{_shown(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _shown(file: str) -> str:
    if file.startswith("<"):
        return file
    path = Path(file)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path.name
