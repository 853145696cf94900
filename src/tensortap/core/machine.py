"""What the machine has to offer this process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["cores", "memory", "neighbours"]

_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def cores() -> int:
    """How many CPU cores this process may use: fewer than the machine has in a container or under taskset."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def memory() -> int:
    """Bytes of main memory that this process may use: fewer than the machine has in a container; 0 where nobody
    says."""
    try:
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    for path in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # no container, or "max"
            most = min(most, int(path.read_text()))
    return most


def neighbours() -> int:
    """How many processes of this job share the machine, as launchers tell."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdigit() else 1
