"""The data of the comparison page: `head` and the columns. docs/report-data.md describes both."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core import statistics
from tensortap.core.causes import CAUSES
from tensortap.core.records import STATUSES, Comparison, Finding, display_name
from tensortap.report import pairs, unmatched
from tensortap.report.findings import inputs_in_words
from tensortap.report.html.data.columns import PageColumn, bits_for
from tensortap.report.html.data.environment import Setting, settings
from tensortap.report.html.data.head import Head
from tensortap.report.html.data.outline import Coded, TableOutline, coded, coded_shapes, elements_of, greatest
from tensortap.report.html.definitions import PAIRS
from tensortap.report.wording import clean, command_line, rough

__all__ = ["PairsData"]

_MOST_UNMATCHED = 2000
_MOST_PERCENT = 65534
_AT_LEAST = 65535
_TEXTS = {
    "rel_l2": ("rel. error", "|candidate − reference| / |reference|; 0 where equal."),
    "one_minus_cosine": ("1 − cos", "How much the directions of both tensors differ."),
    "max_abs": ("max abs", "The greatest absolute difference of two elements."),
    "max_ulp": ("ULP", "The greatest distance in units in the last place."),
    "mismatched": ("mismatched", "Share of elements outside atol + rtol · |reference|."),
    "tolerance": ("allowed", "The relative error that is allowed."),
    "row_rel_l2": ("worst row", "The relative error of the worst row along the last dimension."),
    "row_tolerance": ("allowed per row", "The relative error that is allowed for a single row."),
}
_MAPPED = {
    "module_candidate": ("module, candidate", "The candidate's name of the module, if it differs."),
    "path_candidate": ("path, candidate", "The candidate's name of the tensor, if it differs."),
    "layout": ("layout", "How the candidate's tensor is rearranged to match the reference."),
}
_WITHOUT_ROW = {
    "missing": "never comes",
    "extra": "comes, though not in the reference",
    "recomputed": "its recomputation makes other values",
    "replica": "its replicas differ",
    "layout": "its parts do not make up the whole",
}
"""The defect of a record that is no pair, by status."""


class PairsData:
    """A comparison as columns of plain data."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.outline = TableOutline(comparison.table)
        self.places = _places(comparison)
        """Rows of the births, in execution order."""

    def columns(self) -> tuple[list[PageColumn], dict[str, list[str]]]:
        """Return all columns, and the words of their codes."""
        found, words = self.outline.columns()
        more, more_words = self._judged()
        found += more + self._measured() + self._sides()
        if (parts := self.comparison.rank_parts) is not None:
            text = "The set of ranks that hold it: an index into `mesh.holders`."
            found.append(PageColumn("holders", np.asarray(parts.of_pair, np.int64), "ranks", text))
        return found, words | more_words

    def head(self) -> Head:
        comparison = self.comparison
        return Head(
            result=comparison,
            outline=self.outline,
            start=self._start(),
            first=0 if comparison.first is not None and self.births else None,
            births=self.births,
            by_step=self._by_step(),
            own={"unmatched": self._unmatched(), "mesh": self._mesh()},
            runs={"reference": comparison.reference, "candidate": comparison.candidate},
            settings=self.settings,
            notes=comparison.notes,
            definitions=PAIRS,
        )

    def _mesh(self) -> dict[str, Any] | None:
        """The ranks whose records were joined, for the rows of the map; None if nothing was joined."""
        parts = self.comparison.rank_parts
        if parts is None:
            return None
        codes = {name: code for code, name in enumerate(self.outline.modules.names)}
        ranks = list(parts.coordinates)
        found = [birth for birth in self.comparison.births if birth.layout is not None and birth.module in codes]
        return {
            "side": parts.side,
            "axes": [clean(axis) for axis in parts.axes],
            "ranks": [{"rank": rank, "at": list(parts.coordinates[rank])} for rank in ranks],
            "holders": [[ranks.index(rank) for rank in each] for each in parts.holders],
            "births": [
                {
                    "row": birth.row,
                    "module": codes[birth.module],
                    "step": birth.key.step,
                    "ranks": [ranks.index(rank) for rank in birth.layout.ranks if rank in parts.coordinates],
                }
                for birth in found
                if birth.layout is not None
            ],
        }

    @property
    def settings(self) -> list[Setting]:
        info = self.comparison.info
        return settings(info.get("reference", {}), info.get("candidate", {}))

    # --- columns ---------------------------------------------------------------------------------------------------
    def floats(self, name: str) -> npt.NDArray[np.float64]:
        """Return a column of numbers; NaN where unknown."""
        return np.asarray(self.comparison.table.column(name).to_numpy(), np.float64)

    def _judged(self) -> tuple[list[PageColumn], dict[str, list[str]]]:
        table = self.comparison.table
        status, rule, container = (coded(table.column(name)) for name in ("status", "rule", "container"))
        dtypes, shapes = _both(table, "dtype"), _both(table, "shape")
        mapped = {name: coded(table.column(name)) for name in _MAPPED}
        words = {
            "status": list(STATUSES),
            "rule": rule.words,
            "container": _or_none(container),
            **{name: _or_none(each) for name, each in mapped.items()},
            "dtype": dtypes[1],
            "shape": shapes[1],
        }
        found = [
            PageColumn(
                "status", status.within(words["status"]), "status", "Equal, close, or how it failed.", words="status"
            ),
            PageColumn("birth", _flags(table, "birth"), "birth", "A wrong value was born here."),
            PageColumn("rule", rule.codes, "rule", "The tolerance rule.", words="rule"),
            PageColumn(
                "container",
                container.within(words["container"]),
                "born in",
                "The module in whose own code the value was born, if it is another one.",
                words="container",
            ),
        ]
        for name, (codes, _) in (("dtype", dtypes), ("shape", shapes)):
            for side in ("reference", "candidate"):
                title = f"{name}, {side}"
                found.append(PageColumn(f"{name}_{side}", codes[side], title, f"The {side}'s {name}.", words=name))
        found += [
            PageColumn(name, each.within(words[name]), *_MAPPED[name], words=name) for name, each in mapped.items()
        ]
        return found, words

    def _measured(self) -> list[PageColumn]:
        bits = bits_for(self.outline.rows, error=True)
        error, bar = self.floats("rel_l2"), self.floats("rel_l2_bar")
        numbers = {name: self.floats(name) for name in _TEXTS if name not in ("one_minus_cosine", "rel_l2")}
        numbers = {"rel_l2": error, "one_minus_cosine": 1 - self.floats("cosine"), **numbers}
        with np.errstate(all="ignore"):
            percent = np.nan_to_num(np.where(bar > 0, 100 * bar / error, 0.0), nan=0.0, posinf=_MOST_PERCENT)
            percent = np.minimum(np.rint(percent), _MOST_PERCENT).astype(np.int64)
            percent[np.isinf(bar) & np.isfinite(error)] = _AT_LEAST
        found = [PageColumn(name, numbers[name], *_TEXTS[name], bits=bits) for name in _TEXTS]
        return [
            *found,
            PageColumn("bar_percent", percent, "±", "Half-width of the 95 % interval around the error.", unit="%"),
            PageColumn(
                "exact", _flags(self.comparison.table, "exact"), "exact", "Measured on all elements, not estimated."
            ),
            PageColumn(
                "elements",
                elements_of(coded_shapes(self.comparison.table.column("shape_reference"))),
                "elements",
                "Number of elements of the reference's tensor.",
            ),
        ]

    def _sides(self) -> list[PageColumn]:
        bits = bits_for(self.outline.rows)
        found = []
        for each in statistics.listed():
            if not ((each.show.page and each.show.sides) or each.is_added):
                continue
            for side in ("reference", "candidate"):
                column, like = f"{each.name}_{side}", f"{each.name}_reference" if side == "candidate" else None
                title, text = f"{each.label}, {side}", f"{side.capitalize()}: {each.about}."
                if each.show.form == "count" and not each.is_added:  # a count that was added may be unknown
                    found.append(PageColumn(column, self.outline.ints(column), title, text))
                elif column in self.comparison.table.column_names:
                    found.append(PageColumn(column, self.floats(column), title, text, bits=bits, like=like))
        return found

    # --- head ------------------------------------------------------------------------------------------------------
    @cached_property
    def births(self) -> list[dict[str, Any]]:
        """Every birth that has a row, as text, in execution order."""
        rows = pairs.rows_of(self.comparison, self.places) if self.places else []
        return [self._birth(*each) for each in zip(_seen(self.comparison), self.places, rows, strict=True)]

    @property
    def missing(self) -> list[dict[str, Any]]:
        """Births of one side alone, which have no row, as text."""
        return [
            {
                "row": None,
                "cause": birth.cause.value,
                "title": clean(birth.key),
                "text": (
                    f"{CAUSES[birth.cause].label}: {_WITHOUT_ROW.get(birth.status, birth.status)}{_on_ranks(birth)}; "
                    f"inspect {clean(display_name(birth.module))}"
                ),
            }
            for birth in self.comparison.births
            if birth.row is None
        ]

    def _birth(self, birth: Finding, place: int, row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "row": place,
            "module": int(self.outline.module[place]),
            "place": clean(display_name(birth.module)),
            "step": birth.key.step,
            "rank": birth.rank,
            "status": birth.status,
            "cause": birth.cause.value,
            "title": clean(birth.key),
            "text": birth_text(birth, row),
            "command": command(self.comparison, birth),
        }

    def _start(self) -> int | None:
        """Return the row of the first birth; in a match, of the pair closest to its tolerance."""
        rows = self.places[:1] or (pairs.nearest(self.comparison, 1) if self.outline.rows else [])
        return rows[0] if rows else None

    def _by_step(self) -> dict[str, list[Any]]:
        steps, places = len(self.outline.steps), self.outline.step_places()
        status = coded(self.comparison.table.column("status")).within(STATUSES)
        births = _flags(self.comparison.table, "birth")
        kinds = len(STATUSES)
        counts = np.bincount(places * kinds + status, minlength=steps * kinds).reshape(steps, kinds)
        found: dict[str, list[Any]] = {"pairs": counts.sum(1).tolist()}
        found |= {name: counts[:, at].tolist() for at, name in enumerate(STATUSES)}
        found["births"] = np.bincount(places, births, minlength=steps).astype(int).tolist()
        error = self.floats("rel_l2")
        known = np.isfinite(error) & (status != STATUSES.index("nonfinite"))  # its error covers finite elements alone
        found["worst_row"], found["worst"] = greatest(np.where(known, error, np.nan), places, steps)
        return found

    def _unmatched(self) -> dict[str, Any]:
        groups = [
            {"side": each.side, "modules": each.modules, "tensors": each.tensors}
            | {"name": clean(each.name), "text": unmatched.words(each)}
            for each in unmatched.groups(self.comparison)
        ]
        rows = []
        for each in self.comparison.unmatched[:_MOST_UNMATCHED]:
            key = each.key
            where = [each.side, each.rank, key.step, key.phase, clean(display_name(key.module)), key.call]
            rows.append([*where, key.kind, clean(key.path), clean(each.cls), clean(each.why)])
        return {"count": self.comparison.counts.get("unmatched", 0), "groups": groups, "rows": rows}


def birth_text(birth: Finding, row: Mapping[str, Any]) -> str:
    """Describe a birth, its cause first, without its name."""
    parts = [CAUSES[birth.cause].label]
    if birth.inputs_matched is not None or birth.unjudged:
        came_in = f" ({rough(birth.inputs_rel_l2)})" if birth.inputs_rel_l2 > 0 and birth.inputs_matched else ""
        parts.append(f"inputs {inputs_in_words(birth)}{came_in}")
    if birth.status == "diverged":
        parts.append(f"relative error {pairs.error(row)}, allowed {rough(birth.tolerance)} ({clean(birth.rule)})")
    if more := pairs.detail(row):
        parts.append(more)
    return "; ".join(parts)


def command(comparison: Comparison, birth: Finding) -> str:
    """Return the command that shows the birth in a terminal; empty if no command can repeat the comparison."""
    if comparison.options is None:
        return ""
    words = ["tensortap", "compare", comparison.reference, comparison.candidate, *comparison.options]
    words += [] if "--step" in comparison.options else ["--step", str(birth.key.step)]
    words += ["--module", glob.escape(display_name(birth.key.module)), "--kind", birth.key.kind]
    if birth.rank:
        words += ["--rank", str(birth.rank)]
    return command_line(words)


def _places(comparison: Comparison) -> list[int]:
    """Return the rows of the births."""
    return [birth.row for birth in comparison.births if birth.row is not None]


def _on_ranks(birth: Finding) -> str:
    """Name the ranks of a finding that concerns some of them."""
    if birth.layout is None or not birth.layout.ranks:
        return ""
    ranks = birth.layout.ranks
    return f" (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', …' * (len(ranks) > 8)})"


def _seen(comparison: Comparison) -> list[Finding]:
    """Return the births that have a row in the table: records of one side alone have none."""
    return [birth for birth in comparison.births if birth.row is not None]


def _flags(table: Any, name: str) -> npt.NDArray[np.int64]:
    return np.asarray(table.column(name).to_numpy(), np.int64)


def _or_none(column: Coded) -> list[str]:
    """Return the words of an optional column; the first is empty."""
    return ["", *(word for word in column.words if word)]


def _both(table: Any, name: str) -> tuple[dict[str, npt.NDArray[np.int64]], list[str]]:
    """Encode both sides with one list of words."""
    read = coded_shapes if name == "shape" else coded
    sides = {side: read(table.column(f"{name}_{side}")) for side in ("reference", "candidate")}
    words = list(dict.fromkeys([*sides["reference"].words, *sides["candidate"].words]))
    return {side: each.within(words) for side, each in sides.items()}, words
