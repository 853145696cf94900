"""The structure of a table of pairs or records: modules as a tree, steps, layers and series.

Rows are ordered by rank, then by execution. Everything works on whole columns, so that a million rows are quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tensortap.core.records import KINDS, PHASES
from tensortap.report.html.data.columns import PageColumn
from tensortap.report.html.data.module_tree import Modules
from tensortap.report.wording import shape

__all__ = ["SCHEMA_VERSION", "Coded", "TableOutline", "coded", "coded_shapes", "elements_of", "greatest"]

SCHEMA_VERSION = 1
"""Version of the data in the page; increases when a key changes its meaning or is removed."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Coded:
    """A column of repeated strings: a code for each row, and the word of each code."""

    codes: Ints
    words: list[str]

    def within(self, words: Sequence[str]) -> Ints:
        """Return the codes of the rows in another list that contains all words."""
        places = {word: code for code, word in enumerate(words)}
        return np.array([places[word] for word in self.words], np.int64)[self.codes] if self.words else self.codes


def coded(column: Any) -> Coded:
    """Encode an Arrow column of strings; null becomes the empty string. Every word occurs, in order of appearance."""
    if pa.types.is_dictionary(column.type):  # a selection of rows may have lost some of its words
        column = column.cast(column.type.value_type)
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    array = array.fill_null("").dictionary_encode()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.unify_dictionaries().chunks) if array.num_chunks else pa.array([], pa.string())
    return Coded(array.indices.to_numpy().astype(np.int64), array.dictionary.to_pylist())


def coded_shapes(column: Any) -> Coded:
    """Encode an Arrow column of shapes as text: "8×256×512"."""
    array = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) and column.num_chunks else column
    if not len(array):
        return Coded(np.empty(0, np.int64), [])
    found = coded(pc.binary_join(array.cast(pa.list_(pa.string())), "×"))
    return Coded(found.codes, [word or shape(()) for word in found.words])


def elements_of(shapes: Coded) -> Ints:
    """Return the number of elements of each row's tensor."""
    sizes = [prod(map(int, word.split("×"))) if word[:1].isdecimal() else 1 for word in shapes.words]
    return np.array(sizes, np.int64)[shapes.codes] if sizes else shapes.codes


class TableOutline:
    """The structure that both pages share. `table` has the columns of an identity, `cls` and `rank`."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.rows = int(table.num_rows)

    def ints(self, name: str) -> Ints:
        return np.asarray(self.table.column(name).to_numpy(), np.int64)

    @cached_property
    def _modules(self) -> tuple[Modules, Ints]:
        names, classes = coded(self.table.column("module")), coded(self.table.column("cls"))
        first = np.unique(names.codes, return_index=True)[1]
        found = {names.words[code]: classes.words[classes.codes[first[code]]] for code in self._by_run(names)}
        modules = Modules.of(found)
        return modules, names.within(modules.names)

    def _by_run(self, names: Coded) -> list[int]:
        """Return codes of modules in execution order. The state of modules is recorded earlier and does not count."""
        phases = coded(self.table.column("phase"))
        ran = np.flatnonzero(np.array([word != "state" for word in phases.words], bool)[phases.codes])
        some, first = np.unique(names.codes[ran], return_index=True)
        running: list[int] = some[np.argsort(first)].tolist()
        return list(dict.fromkeys([*running, *range(len(names.words))]))

    @property
    def modules(self) -> Modules:
        return self._modules[0]

    @property
    def module(self) -> Ints:
        """The code of each row's module."""
        return self._modules[1]

    @cached_property
    def series(self) -> Ints:
        """A number that is equal for rows that differ only in their step."""
        whole = np.zeros(self.rows, np.int64)
        for part in (
            self.ints("rank"),
            self.ints("micro"),
            self.ints("call"),
            self.module,
            *(coded(self.table.column(name)).codes for name in ("phase", "kind", "path")),
        ):
            low, high = (int(part.min()), int(part.max())) if len(part) else (0, 0)
            joined = whole * (high - low + 1) + (part - low)
            values, first, inverse = np.unique(joined, return_index=True, return_inverse=True)
            rank = np.empty(len(values), np.int64)
            rank[np.argsort(first, kind="stable")] = np.arange(len(values))  # in order of appearance
            whole = rank[inverse]
        return whole

    @cached_property
    def scopes(self) -> list[dict[str, int]]:
        """Ranges of rows of one step of one rank."""
        ranks, steps = self.ints("rank"), self.ints("step")
        if not self.rows:
            return []
        begins = np.flatnonzero(
            np.diff(ranks, prepend=ranks[0] - 1).astype(bool) | np.diff(steps, prepend=-1).astype(bool)
        )
        ends = [*begins[1:].tolist(), self.rows]
        return [
            {"rank": int(ranks[begin]), "step": int(steps[begin]), "begin": begin, "end": end}
            for begin, end in zip(begins.tolist(), ends, strict=True)
        ]

    @cached_property
    def steps(self) -> list[int]:
        return [int(step) for step in np.unique(self.ints("step"))]

    @cached_property
    def ranks(self) -> list[int]:
        return [int(rank) for rank in np.unique(self.ints("rank"))]

    def start(self, row: int | None) -> dict[str, Any]:
        """Return the first selection of the page: a row, or else the first step."""
        here = (scope for scope in self.scopes if row is None or scope["begin"] <= row < scope["end"])
        scope = next(here, {"step": 0, "rank": 0})
        return {"step": scope["step"], "rank": scope["rank"], "row": row}

    def step_places(self) -> Ints:
        """Return the position of each row's step among the steps."""
        return np.searchsorted(np.array(self.steps, np.int64), self.ints("step"))

    def columns(self) -> tuple[list[PageColumn], dict[str, list[str]]]:
        """Return the columns of the identity, and the words of their codes."""
        path, cls = coded(self.table.column("path")), coded(self.table.column("cls"))
        phase, kind = (coded(self.table.column(name)) for name in ("phase", "kind"))
        words = {
            "phase": _with(PHASES, phase.words),
            "kind": _with(KINDS, kind.words),
            "path": path.words,
            "cls": cls.words,
        }
        found = [
            PageColumn("rank", self.ints("rank"), "rank", "The process of a distributed run."),
            PageColumn("step", self.ints("step"), "step", "Counts optimizer steps."),
            PageColumn("micro", self.ints("micro"), "micro", "Counts forwards of the whole model within a step."),
            PageColumn("call", self.ints("call"), "call", "Counts calls of the module within the micro step."),
            PageColumn("seq", self.ints("seq"), "order", "Execution order within the rank.", rising=True),
            PageColumn(
                "phase",
                phase.within(words["phase"]),
                "phase",
                "forward, backward, or the model's state.",
                words="phase",
            ),
            PageColumn(
                "kind", kind.within(words["kind"]), "kind", "The role of the tensor for its module.", words="kind"
            ),
            PageColumn("module", self.module, "module", "The module that the tensor belongs to."),
            PageColumn(
                "path",
                path.codes,
                "path",
                "Position in the arguments or outputs, or the parameter's own name.",
                words="path",
            ),
            PageColumn("cls", cls.codes, "class", "The module's class.", words="cls"),
            PageColumn("series", self.series, "series", "Equal for rows that differ in their step only.", rising=True),
        ]
        return found, words

    def object(self) -> dict[str, Any]:
        """Return the keys of `head` that describe the rows."""
        return {
            "schema": SCHEMA_VERSION,
            "rows": self.rows,
            "ranks": self.ranks,
            "steps": self.steps,
            "scopes": self.scopes,
            "modules": self.modules.object(),
            "layers": self.modules.layer_objects(),
        }


def _with(known: Sequence[str], met: Sequence[str]) -> list[str]:
    return [*known, *(word for word in met if word not in known)]


def greatest(values: npt.NDArray[np.float64], groups: Any, count: int) -> tuple[list[int | None], list[float | None]]:
    """Return the row with the greatest value of each group, and the value; None if no row has one."""
    rows: list[int | None] = [None] * count
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.lexsort((-known, values[known]))]  # of equal ones, the earliest row is written last
    for group, row in zip(groups[order].tolist(), order.tolist(), strict=True):
        rows[group] = row
    return rows, [None if row is None else float(values[row]) for row in rows]
