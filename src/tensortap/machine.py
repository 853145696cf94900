"""What the machine has to offer this process."""

from __future__ import annotations

import os

__all__ = ["cores"]


def cores() -> int:
    """How many CPU cores this process may use: fewer than the machine has in a container or under taskset."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1
