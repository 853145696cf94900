"""While a device's tensors are tapped, Python goes through all of the program's objects about as seldom as without.

How soon it does so depends on how many objects outlive others, and records do until their step ends. Such a full
garbage collection takes a tenth of a second and more in a process that has a framework loaded, and the device waits.
"""

from __future__ import annotations

import gc
import threading

__all__ = ["put_off", "resume"]

_RARER = 30
"""Not rarer still: cycles that outlive their step must not pile up either."""
_MOST = 2**31 - 1
_lock = threading.RLock()  # the collector itself may close a tap that was dropped, in whatever this thread is doing
_open: set[object] = set()
_before: int | None = None
"""The last threshold as it was before the first of them was opened."""


def put_off(tap: object) -> None:
    """Full collections become rarer, until this tap and all others are closed."""
    with _lock:
        _open.add(tap)
        _fit()


def resume(tap: object) -> None:
    with _lock:
        _open.discard(tap)
        _fit()


def _fit() -> None:
    """The threshold becomes what it should be, unless somebody else has set it meanwhile."""
    global _before
    if bool(_open) == (_before is not None):
        return
    youngest, younger, last = gc.get_threshold()
    if _before is None:
        _before = last
        gc.set_threshold(youngest, younger, _rarer(last))
    else:
        before, _before = _before, None
        if last == _rarer(before):
            gc.set_threshold(youngest, younger, before)


def _rarer(threshold: int) -> int:
    return min(threshold * _RARER, _MOST)
