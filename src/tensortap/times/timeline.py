"""The timeline of a profile: the events that attribution needs, in compact columns. Times are in nanoseconds."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.times.marks import SpanKind, SpanMeaning, meaning_of

__all__ = ["IntColumns", "Timeline"]

_REMEMBERED_NAMES = 1 << 16


class IntColumns:
    """Rows of integers, stored as one array per column."""

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
    """Spans with a meaning, launches, kernels and memory events of one profile.

    A reader calls `add_host_event` for every event of a thread, and adds launches, kernels and memory events to the
    columns of these names.
    """

    framework: str
    backward_calls: str = "graph nodes"
    """The unit of a call in backward: graph nodes, which the profile shows as spans; or module calls, attributed to
    the module whose forward created each node."""
    meanings: list[SpanMeaning] = field(default_factory=list)
    threads: dict[Any, int] = field(default_factory=dict)
    spans: IntColumns = field(default_factory=lambda: IntColumns("thread", "start", "end", "meaning"))
    operators: IntColumns = field(default_factory=lambda: IntColumns("id", "thread", "start"))
    """Host events by the id that kernels may refer to."""
    launches: IntColumns = field(default_factory=lambda: IntColumns("correlation", "thread", "start"))
    kernels: IntColumns = field(default_factory=lambda: IntColumns("device", "start", "end", "correlation", "operator"))
    """Work on a device: kernels, copies and fills. -1 stands for an unknown number."""
    memory: IntColumns = field(default_factory=lambda: IntColumns("thread", "at", "bytes", "on_device"))
    origin: int | None = None
    """The absolute time of zero, for traces whose events count from different origins."""
    begin: int = 2**62
    end: int = -(2**62)
    marked: bool = False
    """Whether the profile has any span of `tensortap.annotate`."""
    _numbers: dict[str, int] = field(default_factory=dict)

    def thread(self, key: Any) -> int:
        """Return the number of a thread; `key` identifies the thread in the profile."""
        number = self.threads.get(key)
        if number is None:
            number = self.threads[key] = len(self.threads)
        return number

    def add_host_event(self, thread: int, start: int, end: int, name: str) -> None:
        """Add an event of a thread. Keep only spans with a meaning; every event extends the covered time."""
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
        """Return the index into `meanings`, or -1 for a name without meaning. A trace repeats few names many times."""
        meaning = meaning_of(name)
        number = -1
        if meaning is not None:
            number = len(self.meanings)
            self.meanings.append(meaning)
            self.marked = self.marked or meaning.kind in (SpanKind.MODULE, SpanKind.BEGINS)
        if meaning is not None or len(self._numbers) < _REMEMBERED_NAMES:
            self._numbers[name] = number
        return number
