"""Memory between the phases of a comparison, and the garbage collector during one."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import pyarrow as pa

__all__ = ["rare_collections", "release_unused"]

_THRESHOLDS = (200_000, 10, 10)
"""Objects that are allocated before the collector looks at the young ones, where Python's own default is 700; and how
often it does so before it looks at the older ones. What a comparison makes for one step is freed without it."""
_lock = Lock()
_running = 0
_before = (0, 0, 0)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the garbage collector run less often.

    A comparison makes many small objects that live for one step. The collector goes through all of them, and through
    all objects of the program, again and again: up to a third of the time. Comparisons may run in several threads; the
    last one restores the setting.
    """
    global _running, _before
    with _lock:
        if not _running:
            _before = gc.get_threshold()
            if 0 < _before[0] < _THRESHOLDS[0]:  # 0: the program has turned it off
                gc.set_threshold(*_THRESHOLDS)
        _running += 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if not _running:
                gc.set_threshold(*_before)


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
