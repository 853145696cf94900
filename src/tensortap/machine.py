"""What the machine has to offer this process."""

from __future__ import annotations

import os

__all__ = ["cores", "memory"]


def cores() -> int:
    """How many CPU cores this process may use: fewer than the machine has in a container or under taskset."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def memory() -> int:
    """Bytes of main memory that the machine has; 0 where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
