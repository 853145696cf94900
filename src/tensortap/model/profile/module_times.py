"""Time and memory by module, from a profile that was taken while the model was annotated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensortap.model.page_width import page_width
from tensortap.times import TimeLedger, Usage, attribute, read_profile
from tensortap.times.facts import facts_of
from tensortap.times.table import Table, check_sort, make_table
from tensortap.times.traces.json_stream import Progress

__all__ = ["ModuleTime", "ModuleTimes", "module_times"]


@dataclass(slots=True)
class ModuleTime:
    """What one module usage in each phase. `(optimizer)`, `(no module)` and the like are rows, too."""

    module: str
    cls: str
    forward: Usage = field(default_factory=Usage)
    backward: Usage = field(default_factory=Usage)
    recompute: Usage = field(default_factory=Usage)
    other: Usage = field(default_factory=Usage)
    """What is neither of a module's phases: the optimizer's step, for example."""

    @property
    def calls(self) -> int:
        """Forward calls, recomputations not counted."""
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
    """Add up the spans of `tensortap.annotate` in a profile.

    `profile` is a `torch.profiler.profile` or a `paddle.profiler.Profiler` that has stopped, or the path of a trace
    that one of them has exported, gzipped or not. `sort` is a column of the table: "own" time (without a module's
    parts), "total", "device_own", "calls", "module", the "order" of the first call, and others. `progress` is called
    with the bytes read and the size of the file.

    >>> with tensortap.annotate(model), torch.profiler.profile(profile_memory=True) as prof:
    ...     model(x).sum().backward()
    >>> print(tensortap.module_times(prof))
    """
    check_sort(sort)
    return ModuleTimes(attribute(read_profile(profile, progress)), sort)


class ModuleTimes:
    """Times of a whole profile. `str()` is a table."""

    def __init__(self, ledger: TimeLedger, sort: str = "own") -> None:
        self.ledger = ledger
        self._sort = sort
        self.rows = self._modules()

    def table(
        self, *, by: str = "module", depth: int | None = None, sort: str | None = None, top: int | None = None
    ) -> Table:
        """Rows of one module, or one class, in one phase.

        `depth=2` folds everything below two levels of names. `top` is the number of rows, None for all of them.
        """
        return make_table(self.ledger, by=by, depth=depth, sort=sort or self._sort, top=top)

    def as_dict(self) -> dict[str, Any]:
        """Ready for json.dumps."""
        return facts_of(self.ledger, self.table())

    def _modules(self) -> list[ModuleTime]:
        rows: dict[tuple[str, str], ModuleTime] = {}
        for (module, cls, phase), usage in self.ledger.usage_by(lambda at: (at.module, at.cls, at.phase)).items():
            setattr(rows.setdefault((module, cls), ModuleTime(module, cls)), phase, usage)
        order = {(row.module, row.cls): place for place, row in reversed(list(enumerate(self.table().rows)))}
        return sorted(rows.values(), key=lambda row: self._key(row, order))

    def _key(self, row: ModuleTime, order: dict[tuple[str, str], int]) -> float:
        """A module has a row in each phase; sums are sorted as sums, all else by the first of these rows."""
        if self._sort in ("own", "total", "device_own"):
            return -float(getattr(row, self._sort))
        return order.get((row.module, row.cls), len(order))

    def __str__(self) -> str:
        from tensortap.report.terminal.times import times_page  # loads rich; importing tensortap must not

        lines = times_page(self.as_dict(), page_width())
        return "\n".join(line.plain for line in lines)

    def __repr__(self) -> str:
        return f"<ModuleTimes of {len(self.rows)} modules>"
