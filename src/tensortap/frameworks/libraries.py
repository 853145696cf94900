"""The shared libraries that this process has loaded."""

from __future__ import annotations

import re
from pathlib import Path

from tensortap.core.machine import read_system_file

__all__ = ["loaded_openmp"]

_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


def loaded_openmp(package: Path) -> str | None:
    """Return the OpenMP runtime of a package: the copy that it ships, or else the only one loaded."""
    maps = read_system_file("/proc/self/maps")  # empty on other platforms than Linux
    mapped = {line.split()[-1] for line in maps.splitlines() if "omp" in line}
    found = sorted(path for path in mapped if _RUNTIME.search(path))
    own = [path for path in found if path.startswith(str(package))]  # also torch.libs, next to torch
    return own[0] if own else found[0] if len(found) == 1 else None
