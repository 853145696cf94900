"""Memory between the phases of a comparison."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import pyarrow as pa

__all__ = ["release_unused"]


def release_unused() -> None:
    """Return freed memory to the system. Allocators keep what one phase freed, and the next phase adds to it."""
    pa.default_memory_pool().release_unused()
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    """Return the C library's function that trims its heaps; None if it has none."""
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library, or another system
        return None
    found.argtypes = [ctypes.c_size_t]
    return found
