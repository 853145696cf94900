"""While a device's tensors are tapped, Python looks for garbage about as seldom as without.

How soon it does so depends on how many objects outlive others, and what belongs to records does until their step ends.
A look at the young ones takes little, but comes several times a step; a full collection takes a tenth of a second and
more in a process that has a framework loaded, and the device waits.
"""

from __future__ import annotations

import gc
import threading

__all__ = ["put_off", "resume"]

_RARER = 3, 1, 10
"""By how much each of `gc.get_threshold` grows. Not more: a program's own cycles must not pile up for it."""
_MOST = 2**31 - 1
_lock = threading.RLock()  # the collector itself may close a tap that was dropped, in whatever this thread is doing
_open: set[object] = set()
_before: tuple[int, ...] | None = None
"""The thresholds as they were before the first of them was opened."""


def put_off(tap: object) -> None:
    """Collections become rarer, until this tap and all others are closed."""
    with _lock:
        _open.add(tap)
        _fit()


def resume(tap: object) -> None:
    with _lock:
        _open.discard(tap)
        _fit()


def _fit() -> None:
    """Each threshold becomes what it should be, unless somebody else has set it meanwhile."""
    global _before
    if bool(_open) == (_before is not None):
        return
    now = gc.get_threshold()
    if _before is None:
        _before = now
        gc.set_threshold(*_rarer(now))
    else:
        before, _before = _before, None
        ours = _rarer(before)
        gc.set_threshold(*(old if is_ == our else is_ for old, our, is_ in zip(before, ours, now, strict=True)))


def _rarer(thresholds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(each * rarer, _MOST) for each, rarer in zip(thresholds, _RARER, strict=True))
