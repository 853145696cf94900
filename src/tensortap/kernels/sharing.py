"""Helper threads that share the work of one call and stay idle until the next.

The caller works as well and never waits for a helper that has not begun, so a busy pool costs nothing. Several threads
may call at once, and a forked child may call, too.
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
"""This many threads saturate the memory of most machines, and a node runs several ranks."""


class Helpers:
    """A pool of threads that starts on first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        _all.add(self)

    def share(self, work: Callable[[], None], helpers: int) -> None:
        """Run `work` on the calling thread and on up to `helpers` others.

        Helpers keep the objects that `work` refers to alive, in case the caller is interrupted.
        """
        started = []
        if helpers > 0:
            try:
                with self._lock:
                    if self._pool is None:
                        self._pool = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix=self._name)
                    started = [self._pool.submit(work) for _ in range(helpers)]
            except RuntimeError:
                pass  # at interpreter shutdown no thread can start: the caller works alone
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
        helpers._forget()  # a forked child has none of its parent's threads


_all: weakref.WeakSet[Helpers] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
