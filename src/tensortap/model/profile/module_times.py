"""Time and memory by module, from a profile of an annotated model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensortap.model.page_width import page_width
from tensortap.times import TimeLedger, Usage, attribute, read_profile
from tensortap.times.facts import facts_of
from tensortap.times.table import Table, check_sort, make_table
from tensortap.times.traces.json_stream import Progress

__all__ = ["ModuleTime", "ModuleTimes", "TimesTable", "module_times"]


@dataclass(slots=True)
class ModuleTime:
    """Time and memory of one module in each phase. `(optimizer)`, `(no module)` and the like are rows, too."""

    module: str
    cls: str
    forward: Usage = field(default_factory=Usage)
    backward: Usage = field(default_factory=Usage)
    recompute: Usage = field(default_factory=Usage)
    other: Usage = field(default_factory=Usage)
    """Anything outside a module's phases, such as the optimizer's step."""

    @property
    def calls(self) -> int:
        """Number of forward calls, without recomputations."""
        return self.forward.pieces

    @property
    def own(self) -> float:
        return sum(usage.own for usage in self._phases())

    @property
    def total(self) -> float:
        return sum(usage.total for usage in self._phases())

    @property
    def device_own(self) -> float:
        return sum(usage.device_own for usage in self._phases())

    def _phases(self) -> tuple[Usage, ...]:
        return self.forward, self.backward, self.recompute, self.other


def module_times(profile: Any, *, sort: str = "own", progress: Progress | None = None) -> ModuleTimes:
    """Sum the spans of `tensortap.annotate` in a profile by module.

    `profile` is a stopped `torch.profiler.profile` or `paddle.profiler.Profiler`, or the path of a trace that one of
    them exported, gzipped or not. `sort` is a column of the table: "own" time (without submodules), "total",
    "device_own", "calls", "module", the "order" of the first call, and others. `progress` is called with the bytes read
    and the size of the file.

    >>> with tensortap.annotate(model), torch.profiler.profile(profile_memory=True) as prof:
    ...     model(x).sum().backward()
    >>> print(tensortap.module_times(prof))
    """
    check_sort(sort)
    return ModuleTimes(attribute(read_profile(profile, progress)), sort)


@dataclass(frozen=True, slots=True)
class TimesTable(Table):
    """A table with the profile that it is from. `str()` returns it as text."""

    ledger: TimeLedger

    def as_dict(self) -> dict[str, Any]:
        """Return the table and the totals, ready for json.dumps."""
        return facts_of(self.ledger, self)

    def __str__(self) -> str:
        from tensortap.report.terminal.times import times_page  # loads rich; importing tensortap must not

        lines = times_page(self.as_dict(), page_width())
        return "\n".join(line.plain for line in lines)

    def __repr__(self) -> str:
        return f"<TimesTable of {len(self.rows)} rows by {self.by}>"


class ModuleTimes:
    """Times of a whole profile. `str()` returns a table."""

    def __init__(self, ledger: TimeLedger, sort: str = "own") -> None:
        self.ledger = ledger
        self._sort = sort
        self.rows = self._modules()

    def table(
        self, *, by: str = "module", depth: int | None = None, sort: str | None = None, top: int | None = None
    ) -> TimesTable:
        """Return one row for each module, or each class, in each phase.

        `depth=2` folds everything below two levels of names. `top` is the number of rows; None returns all.
        """
        made = make_table(self.ledger, by=by, depth=depth, sort=sort or self._sort, top=top)
        return TimesTable(made.rows, made.left_out, made.rest, made.by, made.sort, self.ledger)

    def as_dict(self) -> dict[str, Any]:
        """Return the table and the totals, ready for json.dumps."""
        return self.table().as_dict()

    def _modules(self) -> list[ModuleTime]:
        rows: dict[tuple[str, str], ModuleTime] = {}
        for (module, cls, phase), usage in self.ledger.usage_by(lambda at: (at.module, at.cls, at.phase)).items():
            setattr(rows.setdefault((module, cls), ModuleTime(module, cls)), phase, usage)
        order = {(row.module, row.cls): place for place, row in reversed(list(enumerate(self.table().rows)))}
        return sorted(rows.values(), key=lambda row: self._key(row, order))

    def _key(self, row: ModuleTime, order: dict[tuple[str, str], int]) -> float:
        """Return the sort key of a module: its sum over phases, or for other columns the position of its first row."""
        if self._sort in ("own", "total", "device_own"):
            return -float(getattr(row, self._sort))
        return order.get((row.module, row.cls), len(order))

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return f"<ModuleTimes of {len(self.rows)} modules>"
