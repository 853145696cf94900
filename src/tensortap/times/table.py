"""Rows of a ledger: by module, by class or by depth, sorted and cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tensortap.errors import UsageError
from tensortap.times.ledger import Ledger, Place, Spent

__all__ = ["BY", "SORTS", "Row", "Table", "check_sort", "table"]

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
    """The rows that were asked for, and what they are a part of."""

    rows: tuple[Row, ...]
    left_out: int
    """Rows that `top` cut off."""
    rest: float
    """Own host time of those, in microseconds."""
    by: str
    sort: str


def table(
    ledger: Ledger, *, by: str = "module", depth: int | None = None, sort: str | None = None, top: int | None = None
) -> Table:
    """Make the rows: one for each module or class in each phase.

    With `depth`, everything below so many levels of names is folded into the module at that level. `sort` is one of
    SORTS: numbers come largest first, names in order, and a leading "-" reverses it. None sorts by device time if the
    profile has kernels, and else by host time.
    """
    if by not in BY:
        raise UsageError(f"by: {by!r} is none of {', '.join(BY)}")
    if depth is not None and depth < 0:
        raise UsageError(f"depth: {depth} is below 0, where everything is in one row")
    if top is not None and top < 0:
        raise UsageError(f"top: {top} is below 0; 0 or None gives all rows")
    sort = sort or ("device_own" if ledger.kernels else "own")
    check_sort(sort)
    rows = _rows(ledger, _grouping(ledger, by, depth))
    _order(rows, sort)
    shown = rows[:top] if top else rows
    rest = sum(row.own for row in rows[len(shown) :])
    return Table(tuple(shown), len(rows) - len(shown), rest, by, sort)


def check_sort(sort: str) -> None:
    """Raise UsageError if rows cannot be sorted by this."""
    if sort.removeprefix("-") not in SORTS:
        raise UsageError(f"sort: {sort!r} is none of {', '.join(SORTS)}")


def _grouping(ledger: Ledger, by: str, depth: int | None) -> Callable[[Place], Place]:
    """The place in whose row another place's amounts are counted."""
    if by == "class":
        return lambda place: place if place.module[:1] == "(" and place.module != "(root)" else _of_class(place)
    if depth is None:
        return lambda place: place
    classes = {(place.module, place.phase): place.cls for place in ledger.calls}
    anywhere = {place.module: place.cls for place in ledger.calls}

    def folded(place: Place) -> Place:
        if place.module.startswith("("):
            return place
        name = ".".join(place.module.split(".")[:depth]) or "(root)"
        if name == place.module:
            return place
        return Place(name, classes.get((name, place.phase), anywhere.get(name, "")), place.phase)

    return folded


def _of_class(place: Place) -> Place:
    return replace(place, module="")


def _rows(ledger: Ledger, group: Callable[[Place], Place]) -> list[Row]:
    spent = ledger.spent(group)
    # Calls of what was folded into another row are not calls of that row.
    calls = {place: count for place, count in ledger.calls.items() if group(place) == place}
    by_class = any(place.module == "" for place in spent)
    whole = sum(each.own for each in spent.values()) or 1.0
    device = sum(each.device_own for each in spent.values()) or 1.0
    return [
        _row(place, each, each.pieces if by_class else calls.get(place, 0), whole, device)
        for place, each in spent.items()
        if each
    ]


def _row(place: Place, spent: Spent, calls: int, whole: float, device: float) -> Row:
    return Row(
        module=place.module,
        cls=place.cls,
        phase=place.phase,
        calls=calls,
        own=spent.own,
        own_share=spent.own / whole,
        total=spent.total,
        total_share=spent.total / whole,
        device_own=spent.device_own,
        device_own_share=spent.device_own / device,
        device_total=spent.device,
        device_total_share=spent.device / device,
        memory=spent.memory,
        device_memory=spent.device_memory,
    )


def _order(rows: list[Row], sort: str) -> None:
    column = sort.removeprefix("-")
    backwards = sort.startswith("-")
    if column == "order":
        if backwards:
            rows.reverse()
        return
    attribute = "cls" if column == "class" else column
    largest_first = column not in _NAMES
    rows.sort(key=lambda row: getattr(row, attribute), reverse=largest_first != backwards)
