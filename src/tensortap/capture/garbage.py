"""Keeps Python's garbage collections, while a tap is open, about as rare as without one.

Their frequency depends on how many objects outlive others, and the objects of records live until their step ends. A
collection of young objects is short but runs several times a step. A full collection takes a tenth of a second and more
in a process with a framework, and the training waits for it, as does its device.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused", "resume", "throttle"]

_FACTORS = 3, 1, 10
"""Factors for the values of `gc.get_threshold`. Larger ones would let a program's own cycles pile up."""
_MOST = 2**31 - 1
_lock = threading.RLock()  # the collector may close a dropped tap at any point of this thread
_open: set[object] = set()
_before: tuple[int, ...] | None = None
"""The thresholds before the first tap was opened."""


@contextmanager
def paused() -> Iterator[None]:
    """Run no collection while a tap is opened or closed: it makes many objects, and none is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def throttle(tap: object) -> None:
    """Make collections rarer until this tap and all others are closed."""
    with _lock:
        _open.add(tap)
        _apply()


def resume(tap: object) -> None:
    """Restore the thresholds if no other tap is open."""
    with _lock:
        _open.discard(tap)
        _apply()


def _apply() -> None:
    """Set each threshold, except one that other code has set meanwhile."""
    global _before
    if bool(_open) == (_before is not None):
        return
    now = gc.get_threshold()
    if _before is None:
        _before = now
        gc.set_threshold(*_raised(now))
    else:
        before, _before = _before, None
        ours = _raised(before)
        gc.set_threshold(*(old if is_ == our else is_ for old, our, is_ in zip(before, ours, now, strict=True)))


def _raised(thresholds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(each * factor, _MOST) for each, factor in zip(thresholds, _FACTORS, strict=True))
