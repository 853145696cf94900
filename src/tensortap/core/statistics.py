"""The table of statistics: name, column type, unit, merge rule, definition and presentation of each.

The store, comparisons, exports, JSON and the page list statistics by reading this table. `STORED` are computed by every
kernel in its one pass and are columns of every index. `DERIVED` follow from them and are not stored. `register` adds a
statistic from outside the package; it takes a second pass in NumPy and a column of its own that may be null.

>>> about = "number of elements below zero"
>>> negatives = Statistic("negatives", "int64", about, merge="sum", compute=lambda values: (values < 0).sum())
>>> with register(negatives), tensortap.capture(model, "runs/a") as tap:             # doctest: +SKIP
...     train(model, tap)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tensortap.errors import UsageError

__all__ = [
    "DERIVED",
    "RESERVED",
    "STORED",
    "Display",
    "Form",
    "MergeRule",
    "Statistic",
    "StatisticRegistration",
    "added",
    "derived",
    "fields_of",
    "formula_of",
    "listed",
    "merge_values",
    "register",
    "stored",
]

Form = Literal["count", "number", "share", "digest"]
"""The form of a value: a whole number, a rounded number, a share of the elements, or hexadecimal digits."""
MergeRule = Literal["sum", "least", "greatest", "norm", "wrap", "pooled"]
Getter = Callable[[str], Any]
"""Returns a statistic by its name, as a number or as a column of numbers."""


@dataclass(frozen=True, slots=True)
class Display:
    """The presentation of a statistic."""

    label: str = ""
    """Its name for people; empty: the statistic's own."""
    form: Form = "number"
    terminal: tuple[int, int] | None = None
    """Position among the columns of `tensortap show`, and priority: the column with the highest number is dropped first
    where the terminal is narrow. None: no column, except that an added statistic always gets the last one."""
    page: bool = False
    """Whether it is a column of the page of a run. Added statistics always are."""
    sides: int | None = None
    """Position among the statistics in the table of pairs, which has each of them for the reference and for the
    candidate; None: it has not. Added statistics are there always, last."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """One number of a summary."""

    name: str
    dtype: Literal["int64", "uint64", "float64"]
    """Type of its column."""
    about: str
    """Its definition, as one sentence without the full stop."""
    merge: MergeRule | Callable[[Sequence[Any]], Any] | None = None
    """The rule that combines the values of a tensor's parts to that of the whole: a name, or a function of the parts'
    values in any order. "pooled" needs other statistics, too: see `kernels.summary.reference.merge`. None if it is
    derived.
    """
    unit: str = ""
    """Unit of the value; empty if it is that of the elements."""
    show: Display = field(default_factory=Display)
    compute: Callable[[npt.NDArray[np.float64]], float] | None = None
    """For an added statistic: returns the value of a block of elements, flat and in float64. Blocks are merged."""
    derive: Callable[[Getter], Any] | None = None
    """For a derived statistic: returns its value, or column of values, from others."""

    @property
    def label(self) -> str:
        return self.show.label or self.name

    @property
    def is_count(self) -> bool:
        """Whether it counts elements, so that the counts of parts add up."""
        return self.dtype == "int64" and self.merge == "sum"

    @property
    def is_added(self) -> bool:
        return self.compute is not None

    def typed(self, value: Any) -> Any:
        """Return a value of its column as a Python number; None if it is unknown."""
        if value is None or (value != value and (self.is_added or self.dtype != "float64")):
            return None
        return float(value) if self.dtype == "float64" else int(value)

    @property
    def sentence(self) -> str:
        """Its definition as it is written on the page."""
        words = f"{self.about}, as a share of all elements" if self.show.form == "share" else self.about
        return f"{words[0].upper()}{words[1:]}."


def _count(name: str, about: str, label: str = "", **show: Any) -> Statistic:
    display = Display(label, **{"form": "count", **show})
    return Statistic(name, "int64", about, "sum", unit="elements", show=display)


def _moment(name: str, about: str, merge: MergeRule, label: str = "", **show: Any) -> Statistic:
    return Statistic(name, "float64", about, merge, show=Display(label, **show))


STORED: tuple[Statistic, ...] = (
    _count("elements", "number of elements", terminal=(9, 10), page=True),
    _count("nan", "number of NaN", "NaN", page=True, sides=5),
    _count("posinf", "number of +inf", "+Inf"),
    _count("neginf", "number of -inf", "−Inf"),
    _count("zeros", "number of zeros", form="share", terminal=(8, 5), page=True),
    _count("edge", "number of finite elements at the edge of the dtype's range; all other finite ones are ordinary"),
    _moment("min", "least finite element; NaN if there is none", "least", terminal=(5, 6), page=True),
    _moment("max", "greatest finite element; NaN if there is none", "greatest", terminal=(6, 7), page=True),
    _moment(
        "mean",
        "mean of the ordinary elements; NaN if there is none",
        "pooled",
        terminal=(1, 3),
        page=True,
        sides=1,
    ),
    _moment(
        "std",
        "standard deviation of the ordinary elements; NaN if there is none",
        "pooled",
        terminal=(2, 1),
        page=True,
        sides=2,
    ),
    _moment("l1", "sum of magnitudes of the ordinary elements", "sum", "L1 norm", terminal=(7, 9)),
    _moment(
        "l2",
        "root of the sum of squares of the ordinary elements",
        "norm",
        "L2 norm",
        terminal=(4, 4),
        page=True,
        sides=4,
    ),
    Statistic(
        "digest",
        "uint64",
        "64 bits over all bits and their positions; equal digest, equal tensor",
        "wrap",
        unit="bits",
        show=Display(form="digest"),
    ),
)
"""Computed by every kernel, in the order of the index's columns and of the fields of `core.records.Statistics`."""


def _rms(get: Getter) -> Any:
    ordinary = np.asarray(get("elements") - get("nan") - get("posinf") - get("neginf") - get("edge"))
    return np.where(ordinary > 0, get("l2") / np.sqrt(np.maximum(ordinary, 1)), np.nan)


DERIVED: tuple[Statistic, ...] = (
    Statistic(
        "inf",
        "int64",
        "number of infinities of both signs",
        unit="elements",
        show=Display("Inf", "count", page=True, sides=6),
        derive=lambda get: get("posinf") + get("neginf"),
    ),
    Statistic(
        "nonfinite",
        "int64",
        "number of elements that are NaN or infinite",
        unit="elements",
        show=Display("non-finite", "count"),
        derive=lambda get: get("nan") + get("posinf") + get("neginf"),
    ),
    Statistic(
        "absmax",
        "float64",
        "greatest absolute value of a finite element; NaN if there is none",
        show=Display("abs max", terminal=(3, 2), page=True),
        derive=lambda get: np.maximum(np.abs(get("min")), np.abs(get("max"))),
    ),
    Statistic(
        "rms",
        "float64",
        "root mean square of the ordinary elements; NaN if there is none",
        show=Display(page=True),
        derive=_rms,
    ),
    Statistic(
        "var",
        "float64",
        "variance of the ordinary elements; NaN if there is none",
        show=Display(sides=3),
        derive=lambda get: get("std") ** 2,
    ),
)
"""Computed from the stored statistics by a formula."""

_RECORD = ("step", "micro", "phase", "module", "call", "kind", "path", "rank", "seq", "cls", "class", "dtype", "shape")
_PLACE = ("tensor", "sketch", "file", "offset", "nbytes", "location", "arguments", "row", "title", "more")
_JUDGEMENT = ("status", "birth", "container", "tolerance", "rule", "exact", "rel_l2", "cosine", "max_abs", "mismatched")
RESERVED = frozenset((*_RECORD, *_PLACE, *_JUDGEMENT))
"""Names that columns of the index, of reports or of JSON objects have already."""

_added: tuple[Statistic, ...] = ()


class StatisticRegistration:
    """A registered statistic; leaving the `with` block, or `undo`, removes it again."""

    def __init__(self, statistic: Statistic) -> None:
        self.statistic = statistic

    def undo(self) -> None:
        global _added
        _added = tuple(each for each in _added if each is not self.statistic)

    def __enter__(self) -> Statistic:
        return self.statistic

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def register(statistic: Statistic) -> StatisticRegistration:
    """Add a statistic to all summaries, indexes, comparisons and reports that this process makes from now on.

    Runs that were opened or begun before keep their columns. A tensor on a device is copied to the host to compute it.
    Raise UsageError if the name is taken or the entry is incomplete.
    """
    global _added
    name = statistic.name
    taken = {each.name for each in (*STORED, *DERIVED, *_added)} | RESERVED
    if not name.isidentifier() or name.startswith("_"):
        raise UsageError(f"statistic {name!r}: the name must be a Python identifier without a leading underscore")
    if name in taken:
        raise UsageError(f"statistic {name!r}: the name is taken; choose another one")
    if statistic.dtype not in ("int64", "float64"):
        raise UsageError(f"statistic {name!r}: dtype must be int64 or float64, not {statistic.dtype}")
    if statistic.compute is None:
        raise UsageError(f"statistic {name!r}: compute, a function of an array, is missing")
    rules = [rule for rule in _RULES if rule != "wrap"]  # digests alone wrap around
    if not callable(statistic.merge) and statistic.merge not in rules:
        known = ", ".join(rules)
        raise UsageError(f"statistic {name!r}: merge must be one of {known}, or a function of the parts' values")
    _added = (*_added, statistic)
    return StatisticRegistration(statistic)


def added() -> tuple[Statistic, ...]:
    """Return the statistics that `register` has added, in that order."""
    return _added


def stored() -> tuple[Statistic, ...]:
    """Return all statistics that have a column in the index."""
    return STORED + _added


def listed() -> tuple[Statistic, ...]:
    """Return all statistics, the derived ones last."""
    return STORED + _added + DERIVED


def derived(name: str) -> Callable[[Getter], Any]:
    """Return the formula of a derived statistic.

    >>> float(derived("absmax")({"min": -3.0, "max": 2.0}.__getitem__))
    3.0
    """
    formula = formula_of(name)
    if formula is None:
        raise KeyError(name)
    return formula


def formula_of(name: str) -> Callable[[Getter], Any] | None:
    """Return the formula of a statistic; None if it is stored."""
    return _FORMULAS.get(name)


def fields_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name as the fields of `core.records.Statistics`."""
    fields = {each.name: values[each.name] for each in STORED}
    return fields | {"more": {each.name: values.get(each.name) for each in _added}} if _added else fields


def merge_values(statistic: Statistic, values: Sequence[Any]) -> Any:
    """Return the value of a whole tensor from those of its parts; None if the value of a part is unknown."""
    if any(value is None for value in values):
        return None
    rule = statistic.merge if callable(statistic.merge) else _RULES[str(statistic.merge)]
    found = rule(values)
    return float(found) if statistic.dtype == "float64" and found is not None else statistic.typed(found)


def _least(values: Sequence[Any]) -> Any:
    return min((value for value in values if value == value), default=math.nan)


def _greatest(values: Sequence[Any]) -> Any:
    return max((value for value in values if value == value), default=math.nan)


def _norm(values: Sequence[Any]) -> float:
    total = 0.0
    for value in values:
        total = math.hypot(total, value)
    return total


_RULES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "sum": sum,
    "least": _least,
    "greatest": _greatest,
    "norm": _norm,
    "wrap": lambda values: sum(values) % 2**64,
}
_FORMULAS = {each.name: each.derive for each in DERIVED}
