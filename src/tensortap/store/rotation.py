"""Steps that a ring has dropped: the lines that remain in the other files, and the facts for readers.

A ring that rotates its index keeps the newest steps and those that were kept for good. Files are replaced as a whole: a
new one is written beside the old, and takes its name. A kill at any moment leaves one of the two.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tensortap.core.file_io import BINARY, read_at, write_at
from tensortap.store.format import PARTIAL

__all__ = ["DroppedSteps", "RemainingSteps", "holding", "replace_by_parts"]

_CHUNK = 1 << 20


class DroppedSteps(NamedTuple):
    """The recorded steps that an index no longer has. Its schema's metadata says so."""

    number: int
    last: int

    def metadata(self) -> dict[str, str]:
        return {"dropped_steps": str(self.number), "dropped_last": str(self.last)}

    @classmethod
    def of(cls, metadata: Mapping[bytes, bytes] | None) -> DroppedSteps | None:
        """Return the dropped steps from a schema's metadata; None if there are none, or if the numbers are damaged."""
        try:
            found = cls(int((metadata or {})[b"dropped_steps"]), int((metadata or {})[b"dropped_last"]))
        except (KeyError, ValueError):
            return None
        return found if 0 < found.number <= found.last + 1 else None

    def __str__(self) -> str:
        steps = "recorded step has" if self.number == 1 else "recorded steps have"
        return f"{self.number:,} {steps} left the ring, the last is step {self.last}: the run has no records of them"


class RemainingSteps:
    """The steps that are still in an index, and all steps after the last one that was dropped."""

    def __init__(self, steps: Iterable[int], last_dropped: int) -> None:
        self._steps = sorted(steps)
        self._last_dropped = last_dropped

    def any_between(self, first: int, last: int) -> bool:
        """Return whether one of the steps is in this range; both ends belong to it."""
        at = bisect_left(self._steps, first)
        if last < first:
            return False
        return last > self._last_dropped or (at < len(self._steps) and self._steps[at] <= last)


def holding(steps: Sequence[int], remaining: RemainingSteps, several: bool) -> list[bool]:
    """Return for each line about one subject whether it holds in a remaining step. A line holds until the next one.

    `several`: a step may have several lines, so that the line before it holds in its beginning.
    """
    ended = [remaining.any_between(step, until - (not several)) for step, until in pairwise(steps)]
    return [*ended, True][: len(steps)]


def replace_by_parts(source: int, path: Path, head: bytes, spans: Iterable[tuple[int, int]]) -> int:
    """Replace a file by parts of itself. `source` is its descriptor; return that of the new file.

    The new file begins with `head`. Raise OSError, and leave the file as it is, if that fails: the disk may be full.
    """
    aside = path.with_name(path.name + PARTIAL)
    target = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | BINARY, 0o666)
    try:
        end = _write(target, memoryview(head), 0)
        for offset, nbytes in spans:
            end = _copy(source, offset, nbytes, target, end)
        aside.replace(path)
    except BaseException:
        os.close(target)
        _remove(aside)
        raise
    return target


def _copy(source: int, offset: int, nbytes: int, target: int, end: int) -> int:
    chunk = memoryview(bytearray(min(nbytes, _CHUNK)))
    while nbytes:
        count = read_at(source, chunk[: min(nbytes, _CHUNK)], offset)
        if not count:
            raise OSError(5, "the file is shorter than what was written to it")
        end = _write(target, chunk[:count], end)
        offset, nbytes = offset + count, nbytes - count
    return end


def _write(target: int, data: memoryview, end: int) -> int:
    while data:
        count = write_at(target, data, end)
        data, end = data[count:], end + count
    return end


def _remove(path: Path) -> None:
    with suppress(OSError):  # the first error is the one that counts
        path.unlink()
