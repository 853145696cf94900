"""Compiles `following.c` with the compiler of this Python.

Only the standard library is imported: building a wheel runs this file where nothing else is installed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

__all__ = ["SOURCE", "build", "file_name"]

SOURCE = Path(__file__).with_name("following.c")
_OPTIONS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden")
_LONGEST = 120
"""Seconds that a compiler may take."""


def file_name() -> str:
    """Return the file name of the module for this Python and this source."""
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    content = b"".join(source.read_bytes() for source in sources) + " ".join(_OPTIONS).encode()
    return f"following-{hashlib.sha256(content).hexdigest()[:16]}.{sysconfig.get_config_var('SOABI')}.so"


def build(target: Path) -> None:
    """Compile the module into a file, which appears when it is complete."""
    header = Path(sysconfig.get_path("include"))
    if not (header / "Python.h").is_file():
        raise FileNotFoundError(f"no Python.h in {header}")
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    linking = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    command = [*compiler, *_OPTIONS, *linking, f"-I{header}", str(SOURCE), "-o", str(partial)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_LONGEST)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
