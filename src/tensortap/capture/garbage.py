"""While a recording is open, Python seldom goes through all objects of the program to find cycles among them.

How soon it does so depends on how many objects outlive others, and records do until their step ends. A full collection
takes a tenth of a second and more in a process that has a framework loaded, and the device waits. Young objects, a
step's own cycles among them, are collected as before.
"""

from __future__ import annotations

import gc
import threading

__all__ = ["put_off", "resume"]

_RARER = 100
_lock = threading.Lock()
_recordings = 0
_before, _ours = (0, 0, 0), (0, 0, 0)


def put_off() -> None:
    """A recording begins: full collections become rarer, until as many have ended as have begun."""
    global _recordings, _before, _ours
    with _lock:
        _recordings += 1
        if _recordings == 1:
            _before = gc.get_threshold()
            _ours = (*_before[:2], _before[2] * _RARER)
            gc.set_threshold(*_ours)


def resume() -> None:
    """A recording has ended. Whoever has set other thresholds meanwhile keeps them."""
    global _recordings
    with _lock:
        _recordings -= 1
        if _recordings == 0 and gc.get_threshold() == _ours:
            gc.set_threshold(*_before)
