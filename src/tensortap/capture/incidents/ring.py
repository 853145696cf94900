"""The last steps, whose tensors are held until an incident keeps them or the ring releases them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["Ring"]

_NEWS = 1
"""Number of steps by which results from a device may be late."""


class Ring:
    """Holds the newest `size` steps, the step in progress, and one more, because a device reports with a delay.

    `release` is called with a step whose tensors are no longer needed, `drop` with a step whose summaries are not
    needed either.
    """

    def __init__(
        self, size: int, release: Callable[[int], None], drop: Callable[[int], None] = lambda step: None
    ) -> None:
        self._size = size
        self._release = release
        self._drop = drop
        self._live: deque[int] = deque()
        self._ended: deque[int] = deque(maxlen=size + 1 + _NEWS)
        """The last steps, kept or not."""
        self._wanted: set[int] = set()
        """Steps in progress that are kept when they end."""

    def end_step(self, step: int) -> None:
        """Add a step, and release the oldest."""
        self._ended.append(step)
        if step in self._wanted:
            self._wanted.remove(step)
            return
        self._live.append(step)
        while len(self._live) > self._size + 1 + _NEWS:
            oldest = self._live.popleft()
            self._release(oldest)
            self._drop(oldest)

    def keep(self, step: int, in_progress: bool = False) -> list[int]:
        """Keep a step and the steps before it for good, and return these steps."""
        before = self._size if in_progress else self._size + 1
        window = [each for each in self._ended if each <= step][-before:] if before else []
        chosen = [each for each in window if each in self._live]
        for each in chosen:
            self._live.remove(each)
        if in_progress:
            self._wanted.add(step)
            chosen.append(step)
        return chosen

    def close(self) -> None:
        """Release everything that was not kept, and drop all but the newest steps and the one in progress."""
        newest = list(self._ended)[-self._size - 1 :]
        while self._live:
            step = self._live.popleft()
            self._release(step)
            if step not in newest:
                self._drop(step)
