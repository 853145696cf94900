"""The resources of this machine, and the switch that disables platform-specific paths.

Every path that only some platforms have (direct I/O, positioned reads, borrowed OpenMP threads, huge pages, /proc) has
a portable counterpart, which is taken where the platform lacks the first. TENSORTAP_PORTABLE=1 in the environment takes
the portable paths everywhere: results are the same bit for bit, some take longer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["PORTABLE", "cores", "memory", "neighbours", "read_system_file"]

PORTABLE = os.environ.get("TENSORTAP_PORTABLE", "") not in ("", "0")
"""Whether only portable paths are taken; read when tensortap is imported."""

_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def cores() -> int:
    """Return the number of CPU cores that this process may use: fewer than the machine has under taskset or in a
    container."""
    if not PORTABLE and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> int:
    """Return the bytes of main memory that this process may use, container limits included; 0 if unknown."""
    try:
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    for path in _MEMORY_LIMITS:
        with suppress(ValueError):  # empty where there is no container, "max" where it has no limit
            most = min(most, int(read_system_file(path)))
    return most


def neighbours() -> int:
    """Return the number of processes of this job on the machine, as launchers report it."""
    reported = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(reported)) if reported.isdigit() else 1


def read_system_file(path: Path | str) -> str:
    """Return the text of a file of the kernel, as under /proc; empty where the platform has no such file."""
    if PORTABLE:
        return ""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
