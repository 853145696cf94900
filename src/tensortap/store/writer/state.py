"""What the threads of one writer tell each other: what has changed, and the first failure.

All conditions share one lock, but each thread that waits for work of its own has a condition of its own: with a common
one every slab would wake them all, and each wants the interpreter for a moment before it sleeps again.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

from tensortap.errors import StoreWriteError

__all__ = ["State", "folder_error", "write_error"]

_ADVICE = {
    errno.ENOSPC: "free some space, keep fewer tensors, or write to another disk",
    errno.EDQUOT: "the quota is used up: free some space or write to another disk",
    errno.EACCES: "check that you may write there, or choose another path",
    errno.EPERM: "check that you may write there, or choose another path",
    errno.EROFS: "the disk is read-only: choose another path",
    errno.ENOENT: "the folder was removed: leave it alone until the run is closed",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.EIO: "the disk reports a fault: check it, or write to another disk",
}
_ADVICE_ON_FOLDERS = _ADVICE | {
    errno.ENOENT: "choose another path",
    errno.ENOTDIR: "a part of the path is a file: choose another one",
}


def write_error(error: BaseException, path: object, begun: bool = True) -> StoreWriteError:
    """The one error that users see when the disk does not do as asked: which file, why, and what to do."""
    advice = _ADVICE.get(_number(error) or 0, "see the cause above")
    rest = " What was flushed before stays readable." if begun else ""
    return _told(f"could not write {path}: {_why(error)}; {advice}.{rest}", error)


def folder_error(error: OSError, path: object) -> StoreWriteError:
    """The same for a folder that cannot be made. If something is missing then, nobody has removed it."""
    advice = _ADVICE_ON_FOLDERS.get(error.errno or 0, "choose another path")
    return _told(f"the folder {path} cannot be made: {_why(error)}; {advice}.", error)


def _number(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _why(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


def _told(message: str, error: BaseException) -> StoreWriteError:
    result = StoreWriteError(message)
    result.errno = _number(error)  # not filename or strerror: with those, str() forgets the message
    result.__cause__ = error
    return result


class State:
    """Shared by a writer and its threads. Hold any of its conditions to read or alter what others wait for."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._conditions: list[threading.Condition] = []
        self.changed = self.condition()
        """Notified when something was written or given back."""
        self.failure: tuple[BaseException, object] | None = None
        """What went wrong first, and with which file."""
        self.told = False
        """Whether the caller has seen the failure."""
        self.stalled = 0.0
        """Seconds that callers waited for the disk."""

    def condition(self) -> threading.Condition:
        """For one who waits for something of its own. A failure wakes it too."""
        condition = threading.Condition(self._lock)
        self._conditions.append(condition)
        return condition

    def fail(self, error: BaseException, path: object) -> None:
        """Remember the first failure and wake everyone who waits."""
        with self.changed:
            if self.failure is None:
                self.failure = error, path
            for condition in self._conditions:
                condition.notify_all()

    def check(self) -> None:
        """Raise the failure, if there was one, to the caller: a fresh one, with a traceback of its own."""
        if self.failure is not None:
            self.told = True
            raise write_error(*self.failure)

    def wait_for(self, ready: Callable[[], bool]) -> bool:
        """Wait for `ready`; False if a failure makes waiting pointless. Call with `changed` held."""
        while self.failure is None and not ready():
            self.changed.wait()
        return self.failure is None

    def stall_for(self, ready: Callable[[], bool]) -> None:
        """As wait_for, for a caller that the disk holds up: counts the time, and raises the failure."""
        if self.failure is None and not ready():
            since = time.monotonic()
            self.wait_for(ready)
            self.stalled += time.monotonic() - since
        self.check()
