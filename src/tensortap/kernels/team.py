"""Summaries on the OpenMP threads of a framework.

Between two operations, the OpenMP threads of a framework do not sleep: they spin, waiting for the next one. Other
threads would share the cores with them and gain nothing. If the framework's OpenMP runtime is known, a summary runs on
its team instead, as one more operation.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy as np

from tensortap.kernels.summary import rows

__all__ = ["Team"]


class Team:
    """An OpenMP team that runs `rows.run`. Only the thread that made it may use it: each thread has its own team."""

    def __init__(self, library: str, threads: int) -> None:
        self._parallel = ctypes.CDLL(library).GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        self._owner = os.getpid(), threading.get_ident()
        self._scratch = np.empty(threads * rows.SCRATCH + 64, np.uint8)
        aligned = (self._scratch.ctypes.data + 63) // 64 * 64
        self._taken = np.zeros(1, np.int64)
        self._work = np.zeros(rows.WORK, np.int64)
        self._work[-2:] = aligned, self._taken.ctypes.data
        self.threads = threads

    def is_usable(self) -> bool:
        """Return whether the calling thread may use the team."""
        return self._owner == (os.getpid(), threading.get_ident())

    def run(self, like: Any, work: tuple[int, ...], threads: int) -> None:
        self._taken[0] = 0
        self._work[:-2] = work
        self._parallel(rows.team_entry(like), self._work.ctypes.data, min(threads, self.threads), 0)
