"""The shared libraries that this process has loaded."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["loaded_openmp"]

_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


def loaded_openmp(package: Path) -> str | None:
    """Return the OpenMP runtime of a package: the copy that it ships, or else the only one loaded."""
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    except OSError:  # not on Linux
        return None
    found = sorted(path for path in mapped if _RUNTIME.search(path))
    own = [path for path in found if path.startswith(str(package))]  # also torch.libs, next to torch
    return own[0] if own else found[0] if len(found) == 1 else None
