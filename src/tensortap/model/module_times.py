"""Time and memory by module, from a profile that was taken while the model was annotated."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tensortap.errors import UsageError
from tensortap.frameworks.profiling import Timed, timed_spans
from tensortap.model.spans import OVERHEAD

__all__ = ["ModuleTime", "ModuleTimes", "Spent", "module_times"]

_NAME = re.compile(r"(forward|backward|recompute) (.+) \(([^()]+)\)")
_SORTS = ("own", "total", "name", "order")


@dataclass(slots=True)
class Spent:
    """What one module spent in one phase. Times in microseconds, memory in bytes: allocated less freed."""

    pieces: int = 0
    """Spans: one a call in forward; one a graph node in backward, and one for each node of its parts."""
    total: float = 0.0
    """With its parts, and with what annotating them costs."""
    own: float = 0.0
    """Without either."""
    memory: int = 0
    own_memory: int = 0
    device: float = 0.0
    """Time of the kernels on the device that were launched inside."""
    device_memory: int = 0


@dataclass(slots=True)
class ModuleTime:
    module: str
    cls: str
    forward: Spent = field(default_factory=Spent)
    backward: Spent = field(default_factory=Spent)
    recompute: Spent = field(default_factory=Spent)

    @property
    def calls(self) -> int:
        """Forward calls, recomputations not counted."""
        return self.forward.pieces

    @property
    def own(self) -> float:
        return self.forward.own + self.backward.own + self.recompute.own

    @property
    def total(self) -> float:
        """Recomputation runs inside backward and is in its total already."""
        return self.forward.total + self.backward.total


def module_times(prof: Any, *, sort: str = "own") -> ModuleTimes:
    """Add up the spans of `tensortap.annotate` in a `torch.profiler.profile` that has stopped.

    `sort`: "own" time (without a module's parts), "total", "name", or the "order" of the first call.

    >>> with tensortap.annotate(model), torch.profiler.profile(profile_memory=True) as prof:
    ...     model(x).sum().backward()
    >>> print(tensortap.module_times(prof))
    """
    if sort not in _SORTS:
        raise UsageError(f"sort: {sort!r} is none of {', '.join(_SORTS)}")
    spans = timed_spans(prof, lambda name: name == OVERHEAD or _NAME.fullmatch(name) is not None)
    if not spans:
        raise UsageError(
            "this profile has no spans of tensortap.annotate: wrap the model before the profiled block, "
            "like `with tensortap.annotate(model), torch.profiler.profile() as prof:`"
        )
    rows = list(_added(spans))
    if sort == "name":
        rows.sort(key=lambda row: row.module)
    elif sort != "order":
        rows.sort(key=lambda row: -float(getattr(row, sort)))
    return ModuleTimes(rows)


class ModuleTimes:
    """A row for each module. `str()` is a table."""

    def __init__(self, rows: list[ModuleTime]) -> None:
        self.rows = rows

    def as_dict(self) -> dict[str, Any]:
        """Ready for json.dumps."""
        return {"modules": [{**asdict(row), "calls": row.calls} for row in self.rows]}

    def __str__(self) -> str:
        from tensortap.report.times_page import times_page  # loads rich; importing tensortap must not

        width = os.environ.get("COLUMNS", "")
        lines = times_page(self.as_dict(), int(width) if width.isdecimal() and int(width) >= 40 else 80)
        return "\n".join(line.plain for line in lines)

    def __repr__(self) -> str:
        return f"<ModuleTimes of {len(self.rows)} modules>"


def _added(spans: Iterable[Timed]) -> Iterable[ModuleTime]:
    """Spans come in the order in which they began, an outer one before those inside it."""
    rows: dict[tuple[str, str], ModuleTime] = {}
    stacks: dict[int, list[tuple[Timed, Spent]]] = {}
    for span in spans:
        if span.name == OVERHEAD:
            spent = Spent()  # taken off what encloses it, and shown nowhere
        else:
            phase, module, cls = _parts(span.name)
            spent = getattr(rows.setdefault((module, cls), ModuleTime(module, cls)), phase)
        stack = stacks.setdefault(span.thread, [])
        while stack and stack[-1][0].end <= span.start:
            stack.pop()
        length = span.end - span.start
        spent.pieces += 1
        spent.own += length
        spent.own_memory += span.memory
        if stack:
            stack[-1][1].own -= length
            stack[-1][1].own_memory -= span.memory
        if all(outer is not spent for _, outer in stack):  # inside itself it is counted once
            spent.total += length
            spent.memory += span.memory
            spent.device += span.device_time
            spent.device_memory += span.device_memory
        stack.append((span, spent))
    return rows.values()


def _parts(name: str) -> tuple[str, str, str]:
    found = _NAME.fullmatch(name)
    assert found is not None  # only such names are taken
    return found[1], found[2], found[3]
