"""Threads that help a caller with one call, and wait idle for the next.

The caller works too and never waits for a helper that has not begun, so a busy pool costs nothing. Any thread
may call, several at once, and so may a forked child.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tensortap.core.machine import cores

__all__ = ["MOST_THREADS", "Helpers"]

MOST_THREADS = min(cores(), 8)
"""That many saturate the memory of most machines, and a node runs several ranks."""


class Helpers:
    """A few threads, started when they are first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        _all.add(self)

    def share(self, work: Callable[[], None], helpers: int) -> None:
        """Run `work` here and on so many helpers at once; they hold what it holds, should the caller be interrupted."""
        started = []
        if helpers > 0:
            try:
                with self._lock:
                    if self._pool is None:
                        self._pool = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix=self._name)
                    started = [self._pool.submit(work) for _ in range(helpers)]
            except RuntimeError:
                pass  # the interpreter is shutting down and starts no more threads: alone, then
        work()
        for helper in started:
            if not helper.cancel():
                helper.result()

    def release(self) -> None:
        """End the threads. The next call starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._pool = None


def _after_fork() -> None:
    for helpers in _all:
        helpers._forget()  # a child has none of its parent's threads


_all: weakref.WeakSet[Helpers] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
