"""Compiles `following.c` with the compiler of this Python.

Only the standard library is imported: building a wheel runs this file where nothing else is installed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

__all__ = ["SOURCE", "build", "file_name", "is_available"]

SOURCE = Path(__file__).with_name("following.c")
_OPTIONS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden")
_LONGEST = 120
"""Seconds that a compiler may take."""


def file_name() -> str:
    """Return the file name of the module for this Python and this source."""
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    content = b"".join(source.read_bytes() for source in sources) + " ".join(_OPTIONS).encode()
    return f"following-{hashlib.sha256(content).hexdigest()[:16]}.{sysconfig.get_config_var('SOABI')}.so"


def is_available() -> bool:
    """Return whether there is a compiler, with the headers of this Python."""
    return shutil.which(_compiler()[0]) is not None and (_headers() / "Python.h").is_file()


def build(target: Path) -> None:
    """Compile the module into a file, which appears when it is complete."""
    linking = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    command = [*_compiler(), *_OPTIONS, *linking, f"-I{_headers()}", str(SOURCE), "-o", str(partial)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_LONGEST)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def _headers() -> Path:
    return Path(sysconfig.get_path("include"))
