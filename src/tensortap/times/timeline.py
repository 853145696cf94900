"""What attribution needs of a profile, in compact columns. Times are integers in nanoseconds."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.times.marks import Kind, Meaning, meaning_of

__all__ = ["Columns", "Timeline"]

_REMEMBERED_NAMES = 1 << 16


class Columns:
    """Rows of integers, one array a column."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._columns = [array("q") for _ in names]
        self._appends = [column.append for column in self._columns]

    def add(self, *row: int) -> None:
        for append, value in zip(self._appends, row, strict=True):
            append(value)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, name: str) -> npt.NDArray[np.int64]:
        return np.array(self._columns[self._names.index(name)], np.int64)


@dataclass
class Timeline:
    """The spans that mean something, the launches and kernels, and the memory events of one profile.

    A reader calls `host` for every event of a thread and the other methods for what else it finds.
    """

    framework: str
    backward_calls: str = "graph nodes"
    """What a call in backward is: graph nodes, whose spans the profile has; or module calls, attributed by the module
    whose forward made each node."""
    meanings: list[Meaning] = field(default_factory=list)
    threads: dict[Any, int] = field(default_factory=dict)
    spans: Columns = field(default_factory=lambda: Columns("thread", "start", "end", "meaning"))
    operators: Columns = field(default_factory=lambda: Columns("id", "thread", "start"))
    """Every host event by the number that kernels may refer to."""
    launches: Columns = field(default_factory=lambda: Columns("correlation", "thread", "start"))
    kernels: Columns = field(default_factory=lambda: Columns("device", "start", "end", "correlation", "operator"))
    """Work on a device: kernels, copies and fills. -1 where a number is not known."""
    memory: Columns = field(default_factory=lambda: Columns("thread", "at", "bytes", "on_device"))
    origin: int | None = None
    """The absolute time of zero, where events of one trace count from different origins."""
    begin: int = 2**62
    end: int = -(2**62)
    marked: bool = False
    """Whether there is any span of `tensortap.annotate`."""
    _numbers: dict[str, int] = field(default_factory=dict)

    def thread(self, key: Any) -> int:
        """Number of a thread; `key` is whatever tells threads apart in the profile."""
        number = self.threads.get(key)
        if number is None:
            number = self.threads[key] = len(self.threads)
        return number

    def host(self, thread: int, start: int, end: int, name: str) -> None:
        """Add an event of a thread. Only spans with a meaning are kept; all of them extend the time covered."""
        if start < self.begin:
            self.begin = start
        if end > self.end:
            self.end = end
        number = self._numbers.get(name)
        if number is None:
            number = self._number(name)
        if number >= 0:
            self.spans.add(thread, start, end, number)

    def _number(self, name: str) -> int:
        """Index into `meanings`; -1 for a name without meaning. A trace repeats few names many times."""
        meaning = meaning_of(name)
        number = -1
        if meaning is not None:
            number = len(self.meanings)
            self.meanings.append(meaning)
            self.marked = self.marked or meaning.kind in (Kind.MODULE, Kind.BEGINS)
        if meaning is not None or len(self._numbers) < _REMEMBERED_NAMES:
            self._numbers[name] = number
        return number
