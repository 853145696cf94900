"""The data of the page about one run: `head` and the columns. docs/report-data.md describes both."""

from __future__ import annotations

import glob
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core import statistics
from tensortap.core.records import HEALTH_STATUSES, Coverage, HealthFinding, HealthReport, display_name
from tensortap.report.facts import RunFacts
from tensortap.report.html.data.columns import PageColumn, bits_for
from tensortap.report.html.data.environment import Setting, settings
from tensortap.report.html.data.head import Head
from tensortap.report.html.data.outline import TableOutline, coded, coded_shapes, greatest
from tensortap.report.html.definitions import RUN
from tensortap.report.wording import clean, command_line

__all__ = ["RunData"]


class RunData:
    """One run as columns of plain data."""

    def __init__(self, facts: RunFacts, examination: HealthReport) -> None:
        self.facts = facts
        self.examination = examination
        self.outline = TableOutline(examination.table)

    def columns(self) -> tuple[list[PageColumn], dict[str, list[str]]]:
        found, words = self.outline.columns()
        table, bits = self.examination.table, bits_for(self.outline.rows)
        dtype, shape = coded(table.column("dtype")), coded_shapes(table.column("shape"))
        words |= {"status": list(HEALTH_STATUSES), "dtype": dtype.words, "shape": shape.words}
        found += [
            PageColumn("status", self._status, "status", "Whether anything is suspicious.", words="status"),
            PageColumn("birth", self._ints("birth"), "birth", "Where trouble first shows."),
            PageColumn("dtype", dtype.codes, "dtype", "The elements' type.", words="dtype"),
            PageColumn("shape", shape.codes, "shape", "The tensor's shape.", words="shape"),
        ]
        found += [self._statistic(each, bits) for each in statistics.listed() if each.show.page or each.is_added]
        return found, words

    def _statistic(self, statistic: statistics.Statistic, bits: int) -> PageColumn:
        name, label, text = statistic.name, statistic.label, statistic.sentence
        if statistic.show.form == "count" and not statistic.is_added:
            whole = self._ints(name) if statistic.derive is None else statistic.derive(self._ints)
            return PageColumn(name, whole, label, text)
        values = self._floats(name) if statistic.derive is None else statistic.derive(self._floats)
        if statistic.show.form == "share":
            values = values / np.maximum(self._ints("elements"), 1)
        return PageColumn(name, values, label, text, bits=bits)

    def head(self) -> Head:
        births, first = self.births, self.first
        return Head(
            result=self.examination,
            outline=self.outline,
            start=None if first is None else births[first]["row"],
            first=first,
            births=births,
            by_step=self._by_step(),
            own={
                "gradients": self._gradients(),
                "coverage": [{"rank": rank, **row.as_dict()} for rank, row in self.unseen],
            },
            runs={"reference": self.examination.path},
            settings=self.settings,
            notes=self.notes,
            definitions=RUN,
        )

    @property
    def notes(self) -> list[str]:
        return [*self.facts.notices, *self.examination.notes]

    @property
    def settings(self) -> list[Setting]:
        return settings(self.facts.info)

    @property
    def unseen(self) -> list[tuple[int, Coverage]]:
        """Modules that were not fully seen."""
        every = ((rank, row) for rank, rows in self.facts.coverage.items() for row in rows)
        return [(rank, row) for rank, row in every if row.status != "seen" or row.reason]

    @cached_property
    def births(self) -> list[dict[str, Any]]:
        return [self._birth(birth) for birth in self.examination.births]

    @property
    def first(self) -> int | None:
        """Index of the birth that the sentence names: a NaN comes first."""
        nonfinite = (at for at, birth in enumerate(self.births) if birth["status"] == "nonfinite")
        return next(nonfinite, 0 if self.births else None)

    def _birth(self, birth: HealthFinding) -> dict[str, Any]:
        return {
            "row": birth.row,
            "module": int(self.outline.module[birth.row]),
            "place": clean(display_name(birth.key.module)),
            "step": birth.key.step,
            "rank": birth.rank,
            "status": birth.status,
            "title": clean(birth.key),
            "text": f"{birth.status}: {birth.text}",
            "command": self._command(birth),
        }

    def _command(self, birth: HealthFinding) -> str:
        words = ["tensortap", "show", self.examination.path, "--module", glob.escape(display_name(birth.key.module))]
        words += ["--kind", birth.key.kind, "--step", str(birth.key.step)]
        words += ["--rank", str(birth.rank)] if len(self.outline.ranks) > 1 else []
        return command_line(words)

    # --- numbers ---------------------------------------------------------------------------------------------------
    def _ints(self, name: str) -> npt.NDArray[np.int64]:
        return self.outline.ints(name)

    def _floats(self, name: str) -> npt.NDArray[np.float64]:
        return np.asarray(self.examination.table.column(name).to_numpy(), np.float64)

    @cached_property
    def _status(self) -> npt.NDArray[np.int64]:
        return coded(self.examination.table.column("status")).within(HEALTH_STATUSES)

    def _by_step(self) -> dict[str, list[Any]]:
        steps, places = len(self.outline.steps), self.outline.step_places()
        kinds = len(HEALTH_STATUSES)
        counts = np.bincount(places * kinds + self._status, minlength=steps * kinds).reshape(steps, kinds)
        found: dict[str, list[Any]] = {"records": counts.sum(1).tolist()}
        found |= {name: counts[:, at].tolist() for at, name in enumerate(HEALTH_STATUSES)}
        found["births"] = np.bincount(places, self._ints("birth"), minlength=steps).astype(int).tolist()
        found["gradient_norm"] = self._norms(places, steps)
        found["worst_row"], found["worst"] = greatest(statistics.derived("absmax")(self._floats), places, steps)
        return found

    def _gradients(self) -> dict[str, Any]:
        """Return norms of parameter gradients by layer and step."""
        layers = np.array(self.outline.modules.layers, np.int64)[self.outline.module]
        count, steps = len(self.outline.modules.layer_codes), len(self.outline.steps)
        norms = self._norms(layers * steps + self.outline.step_places(), count * steps)
        rows = [norms[at * steps : (at + 1) * steps] for at in range(count)]
        some = [at for at, row in enumerate(rows) if any(norm is not None for norm in row)]
        return {
            "steps": self.outline.steps,
            "layers": [self.outline.modules.layer_codes[at] for at in some],
            "norm": [rows[at] for at in some],
        }

    def _norms(self, groups: Any, count: int) -> list[float | None]:
        """Return the norm of all parameter gradients of each group on the first rank; None without gradients, infinite
        if one is not finite."""
        if not self.outline.rows:
            return [None] * count
        kinds = coded(self.examination.table.column("kind"))
        wanted = np.array([word == "param_grad" for word in kinds.words], bool)[kinds.codes]
        rows = np.flatnonzero(wanted & (self._ints("rank") == self.outline.ranks[0]))
        lost = (self._ints("nan") + self._ints("posinf") + self._ints("neginf"))[rows] > 0
        l2 = np.where(lost, np.inf, self._floats("l2")[rows])
        squares = np.bincount(groups[rows], l2 * l2, minlength=count)
        there = np.bincount(groups[rows], minlength=count)
        return [float(square**0.5) if some else None for square, some in zip(squares, there, strict=True)]
