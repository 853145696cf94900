"""The data of the page about one run: `head` and the columns. docs/report-data.md describes both."""

from __future__ import annotations

import glob
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core.records import HEALTH_STATUSES, Coverage, HealthFinding, HealthReport, display_name
from tensortap.report.facts import RunFacts
from tensortap.report.html.data.columns import Column, bits_for
from tensortap.report.html.data.environment import Setting, settings
from tensortap.report.html.data.head import Head
from tensortap.report.html.data.outline import TableOutline, coded, coded_shapes, greatest
from tensortap.report.html.definitions import RUN
from tensortap.report.wording import clean, command_line

__all__ = ["RunData"]

_TEXTS = {
    "rms": ("rms", "Root mean square of the finite elements."),
    "absmax": ("abs max", "The greatest absolute value of a finite element."),
    "mean": ("mean", "Mean of the finite elements."),
    "std": ("std", "Standard deviation of the finite elements."),
    "min": ("min", "The least finite element."),
    "max": ("max", "The greatest finite element."),
    "l2": ("l2", "Norm of the finite elements."),
    "zeros": ("zeros", "Share of elements that are zero."),
}


class RunData:
    """One run as columns of plain data."""

    def __init__(self, facts: RunFacts, examination: HealthReport) -> None:
        self.facts = facts
        self.examination = examination
        self.outline = TableOutline(examination.table)

    def columns(self) -> tuple[list[Column], dict[str, list[str]]]:
        found, words = self.outline.columns()
        table, bits = self.examination.table, bits_for(self.outline.rows)
        dtype, shape = coded(table.column("dtype")), coded_shapes(table.column("shape"))
        words |= {"status": list(HEALTH_STATUSES), "dtype": dtype.words, "shape": shape.words}
        found += [
            Column("status", self._status, "status", "Whether anything is suspicious.", words="status"),
            Column("birth", self._ints("birth"), "birth", "Where trouble first shows."),
            Column("dtype", dtype.codes, "dtype", "The elements' type.", words="dtype"),
            Column("shape", shape.codes, "shape", "The tensor's shape.", words="shape"),
            Column("elements", self._ints("elements"), "elements", "How many the tensor has."),
            Column("nan", self._ints("nan"), "NaN", "How many there are."),
            Column("inf", self._ints("posinf") + self._ints("neginf"), "Inf", "How many there are, of both signs."),
        ]
        numbers = {name: self._floats(name) for name in ("mean", "std", "min", "max", "l2")}
        numbers |= {"rms": self._rms, "absmax": self._absmax}
        numbers["zeros"] = self._floats("zeros") / np.maximum(self._ints("elements"), 1)
        found += [Column(name, numbers[name], *texts, bits=bits) for name, texts in _TEXTS.items()]
        return found, words

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

    @cached_property
    def _rms(self) -> npt.NDArray[np.float64]:
        finite = self._ints("elements") - self._ints("nan") - self._ints("posinf") - self._ints("neginf")
        rms: npt.NDArray[np.float64] = self._floats("l2") / np.sqrt(np.maximum(finite, 1))
        return np.where(finite > 0, rms, np.nan)

    @cached_property
    def _absmax(self) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = np.maximum(np.abs(self._floats("min")), np.abs(self._floats("max")))
        return found

    def _by_step(self) -> dict[str, list[Any]]:
        steps, places = len(self.outline.steps), self.outline.step_places()
        kinds = len(HEALTH_STATUSES)
        counts = np.bincount(places * kinds + self._status, minlength=steps * kinds).reshape(steps, kinds)
        found: dict[str, list[Any]] = {"records": counts.sum(1).tolist()}
        found |= {name: counts[:, at].tolist() for at, name in enumerate(HEALTH_STATUSES)}
        found["births"] = np.bincount(places, self._ints("birth"), minlength=steps).astype(int).tolist()
        found["gradient_norm"] = self._norms(places, steps)
        found["worst_row"], found["worst"] = greatest(self._absmax, places, steps)
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
