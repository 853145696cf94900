"""State that the threads of one writer share: notifications of changes, and the first failure.

All conditions share one lock, but each waiting thread has its own condition. With a common one, every slab would wake
all threads, and each needs the interpreter for a moment before it sleeps again.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

from tensortap.errors import StoreWriteError

__all__ = ["WriterState", "folder_error", "write_error"]

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
    """Return the error for a failed write: which file, why, and what to do."""
    if isinstance(error, StoreWriteError):  # of an upload, which says all of it
        return StoreWriteError(str(error))
    advice = _ADVICE.get(_number(error) or 0, "see the cause above")
    rest = " Everything flushed before stays readable." if begun else ""
    return _store_error(f"could not write {path}: {_why(error)}; {advice}.{rest}", error)


def folder_error(error: OSError, path: object) -> StoreWriteError:
    """Return the error for a folder that cannot be created. A missing parent was not removed during the run."""
    advice = _ADVICE_ON_FOLDERS.get(error.errno or 0, "choose another path")
    return _store_error(f"the folder {path} cannot be created: {_why(error)}; {advice}.", error)


def _number(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _why(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


def _store_error(message: str, error: BaseException) -> StoreWriteError:
    result = StoreWriteError(message)
    result.errno = _number(error)  # not filename or strerror: with those, str() forgets the message
    result.__cause__ = error
    return result


class WriterState:
    """Shared by a writer and its threads. Hold one of its conditions to read or change it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._conditions: list[threading.Condition] = []
        self.changed = self.condition()
        """Notified when something was written, or a slab was returned."""
        self.failure: tuple[BaseException, object] | None = None
        """The first error, and its file."""
        self.reported = False
        """Whether the failure was raised to the caller."""
        self.stalled = 0.0
        """Seconds that callers waited for the disk."""

    def condition(self) -> threading.Condition:
        """Return a condition for one thread. A failure notifies it too."""
        condition = threading.Condition(self._lock)
        self._conditions.append(condition)
        return condition

    def fail(self, error: BaseException, path: object) -> None:
        """Keep the first failure and wake all waiting threads."""
        with self.changed:
            if self.failure is None:
                self.failure = error, path
            for condition in self._conditions:
                condition.notify_all()

    def check(self) -> None:
        """Raise the failure, if there is one, as a new exception with its own traceback."""
        if self.failure is not None:
            self.reported = True
            raise write_error(*self.failure)

    def wait_for(self, ready: Callable[[], bool]) -> bool:
        """Wait for `ready`; return False if a failure makes waiting pointless. Call with `changed` held."""
        while self.failure is None and not ready():
            self.changed.wait()
        return self.failure is None

    def stall_for(self, ready: Callable[[], bool]) -> None:
        """Wait for `ready` on behalf of a caller: count the time as stalled, and raise a failure."""
        if self.failure is None and not ready():
            since = time.monotonic()
            self.wait_for(ready)
            self.stalled += time.monotonic() - since
        self.check()
