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
_lock = threading.Lock()
_taps = 0
_before, _ours = (0, 0, 0), (0, 0, 0)


def put_off() -> None:
    """A tap was opened: full collections become rarer, until as many have been closed."""
    global _taps, _before, _ours
    with _lock:
        if not _taps:
            _before = gc.get_threshold()
            _ours = (*_before[:2], min(_before[2] * _RARER, _MOST))
            gc.set_threshold(*_ours)
        _taps += 1


def resume() -> None:
    """A tap was closed. Whoever has set other thresholds meanwhile keeps them."""
    global _taps
    with _lock:
        _taps -= 1
        if not _taps and gc.get_threshold() == _ours:
            gc.set_threshold(*_before)
