"""Tables of a ledger: rows by module, class or depth, sorted and limited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tensortap.errors import UsageError
from tensortap.times.ledger import ModulePhase, TimeLedger, Usage

__all__ = ["BY", "SORTS", "Row", "Table", "check_sort", "make_table"]

BY = ("module", "class")
SORTS = (
    "own",
    "total",
    "device_own",
    "device_total",
    "calls",
    "memory",
    "device_memory",
    "module",
    "class",
    "phase",
    "order",
)
_NAMES = ("module", "class", "phase")


@dataclass(frozen=True, slots=True)
class Row:
    """A module in one phase. Times in microseconds, shares of the whole profile from 0 to 1, memory in bytes."""

    module: str
    cls: str
    phase: str
    calls: int
    own: float
    own_share: float
    total: float
    total_share: float
    device_own: float
    device_own_share: float
    device_total: float
    device_total_share: float
    memory: float
    device_memory: float


@dataclass(frozen=True, slots=True)
class Table:
    """The selected rows, and how much they leave out."""

    rows: tuple[Row, ...]
    left_out: int
    """Number of rows beyond `top`."""
    rest: float
    """Own host time of the rows beyond `top`, in microseconds."""
    by: str
    sort: str


def make_table(
    ledger: TimeLedger, *, by: str = "module", depth: int | None = None, sort: str | None = None, top: int | None = None
) -> Table:
    """Return one row for each module or class in each phase.

    `depth` folds modules below that level of names into the module at that level. `sort` is one of SORTS: numbers come
    largest first, names in alphabetical order, and a leading "-" reverses the order. None sorts by device time if the
    profile has kernels, else by host time.
    """
    if by not in BY:
        raise UsageError(f"by: {by!r} is not one of {', '.join(BY)}")
    if depth is not None and depth < 0:
        raise UsageError(f"depth: {depth} is below 0; 0 puts everything into one row")
    if top is not None and top < 0:
        raise UsageError(f"top: {top} is below 0; 0 or None gives all rows")
    sort = sort or ("device_own" if ledger.kernels else "own")
    check_sort(sort)
    rows = _rows(ledger, _row_of(ledger, by, depth))
    _sort_rows(rows, sort)
    shown = rows[:top] if top else rows
    rest = sum(row.own for row in rows[len(shown) :])
    return Table(tuple(shown), len(rows) - len(shown), rest, by, sort)


def check_sort(sort: str) -> None:
    """Raise UsageError unless `sort` is one of SORTS, with or without a leading "-"."""
    if sort.removeprefix("-") not in SORTS:
        raise UsageError(f"sort: {sort!r} is not one of {', '.join(SORTS)}")


def _row_of(ledger: TimeLedger, by: str, depth: int | None) -> Callable[[ModulePhase], ModulePhase]:
    """Return the function that maps a module and phase to the row that its amounts count in."""
    if by == "class":
        return lambda place: place if place.module[:1] == "(" and place.module != "(root)" else _class_row(place)
    if depth is None:
        return lambda place: place
    classes = {(place.module, place.phase): place.cls for place in ledger.calls}
    anywhere = {place.module: place.cls for place in ledger.calls}

    def folded(place: ModulePhase) -> ModulePhase:
        if place.module.startswith("("):
            return place
        name = ".".join(place.module.split(".")[:depth]) or "(root)"
        if name == place.module:
            return place
        return ModulePhase(name, classes.get((name, place.phase), anywhere.get(name, "")), place.phase)

    return folded


def _class_row(place: ModulePhase) -> ModulePhase:
    return replace(place, module="")


def _rows(ledger: TimeLedger, group: Callable[[ModulePhase], ModulePhase]) -> list[Row]:
    usage = ledger.usage_by(group)
    # Calls of a module that is folded into another row are not calls of that row.
    calls = {place: count for place, count in ledger.calls.items() if group(place) == place}
    by_class = any(place.module == "" for place in usage)
    host_time = sum(each.own for each in usage.values()) or 1.0
    device_time = sum(each.device_own for each in usage.values()) or 1.0
    return [
        _row(place, each, each.pieces if by_class else calls.get(place, 0), host_time, device_time)
        for place, each in usage.items()
        if each
    ]


def _row(place: ModulePhase, usage: Usage, calls: int, host_time: float, device_time: float) -> Row:
    return Row(
        module=place.module,
        cls=place.cls,
        phase=place.phase,
        calls=calls,
        own=usage.own,
        own_share=usage.own / host_time,
        total=usage.total,
        total_share=usage.total / host_time,
        device_own=usage.device_own,
        device_own_share=usage.device_own / device_time,
        device_total=usage.device,
        device_total_share=usage.device / device_time,
        memory=usage.memory,
        device_memory=usage.device_memory,
    )


def _sort_rows(rows: list[Row], sort: str) -> None:
    column = sort.removeprefix("-")
    is_reversed = sort.startswith("-")
    if column == "order":
        if is_reversed:
            rows.reverse()
        return
    attribute = "cls" if column == "class" else column
    largest_first = column not in _NAMES
    rows.sort(key=lambda row: getattr(row, attribute), reverse=largest_first != is_reversed)
