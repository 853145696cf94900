"""HookGuard: the wrapper around every hook of a tap."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from tensortap.capture import native_classes

__all__ = ["HookGuard", "new_lock"]


def new_lock() -> AbstractContextManager[Any]:
    """Return a lock that one thread may take several times: the quickest that there is for hooks."""
    native = native_classes.load()
    return threading.RLock() if native is None else cast(AbstractContextManager[Any], native.HookLock())


class HookGuard:
    """Skips hooks while nothing is recorded, lets one run at a time, catches their errors, and adds up their time.

    `native/hooks.h` reads these attributes, and does the same around the hooks that it has.
    """

    __slots__ = ("_deliver", "_seconds", "handle", "interrupt", "listening", "lock")

    def __init__(
        self, lock: AbstractContextManager[Any], handle: Callable[[BaseException], None], deliver: Callable[[], None]
    ) -> None:
        """`handle` gets the errors; `deliver` raises the interrupt, if that is possible now."""
        self.lock = lock
        self.handle = handle
        self.listening = False
        """Whether hooks run."""
        self._seconds = 0.0
        self.interrupt: BaseException | None = None
        """An interrupt that could not be raised in its hook, until the next point where it can."""
        self._deliver = deliver

    @property
    def seconds(self) -> float:
        """The time that hooks have taken."""
        return self._seconds + getattr(self.lock, "seconds", 0.0)

    def __call__(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook with its errors caught: an error stops the recording, but not the step that calls the hook.

        An exception of the user, which a signal handler raises inside the hook, reaches the user.
        """

        def guarded(*args: Any) -> Any:
            if not self.listening:
                if self.interrupt is not None:
                    self._deliver()
                return None
            started = time.perf_counter()
            try:
                with self.lock:
                    return hook(*args)
            except BaseException as error:
                self.handle(error)
                return None
            finally:
                self._seconds += time.perf_counter() - started

        return guarded
