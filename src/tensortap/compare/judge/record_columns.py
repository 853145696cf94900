"""The columns of the pairs' records, as the reference has them. Rows are numbers of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import repeat

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.distinct import distinct
from tensortap.compare.align.side import Ints, Side

__all__ = ["RecordColumns"]


class RecordColumns:
    """Columns by row, built on first use: a comparison in which all is right needs none of them.

    Rules read single elements, which lists and views return fastest; equal elements of a list are one object.

    rows: the reference's rows of the pairs, in its order.
    renamed: calls whose outputs count as those of another call, because the candidate has both in one.
    """

    def __init__(
        self, side: Side, rows: Ints, renamed: Mapping[tuple[str, int], tuple[str, int]] | None = None
    ) -> None:
        self._side = side
        self._renamed = renamed or {}
        self._rows = rows

    @cached_property
    def tensor(self) -> Sequence[int]:
        return self._view(self._at(self._side.tensor_id))

    @cached_property
    def kind(self) -> list[str]:
        return self._side.kind.at(self._rows)

    @cached_property
    def module(self) -> list[str]:
        if not self._renamed:
            return self._side.module.at(self._rows)
        return [module for module, _ in self._modules_and_calls]

    @cached_property
    def _modules_and_calls(self) -> list[tuple[str, int]]:
        """Modules and numbers of calls, with those that count as another call."""
        found = zip(self._side.module.at(self._rows), self._side.call[self._rows].tolist(), strict=True)
        kinds = zip(found, self.kind, strict=True)
        return [self._renamed.get(call, call) if kind in ("output", "grad_output") else call for call, kind in kinds]

    @cached_property
    def path(self) -> list[str]:
        return self._side.path.at(self._rows)

    @cached_property
    def scope(self) -> list[tuple[int, int, int]]:
        """Rank, step and micro step; see `Side.pass_number`."""
        columns = [self._at(column) for column in (self._side.rank, self._side.step, self._side.pass_number)]
        begins = self.scope_begins
        lengths = np.diff(begins, append=len(self._rows)).tolist()
        found = zip(*(column[begins].tolist() for column in columns), strict=True)
        return [scope for each, length in zip(found, lengths, strict=True) for scope in repeat(each, length)]

    @cached_property
    def number(self) -> Sequence[int]:
        if not self._renamed:
            return self._view(self._at(self._side.call))
        return [number for _, number in self._modules_and_calls]

    @cached_property
    def seq(self) -> Sequence[int]:
        return self._view(self._at(self._side.seq))

    @cached_property
    def first_seen(self) -> Sequence[int]:
        """For each row, the first row with the same tensor; for an operator, which is judged last, the row itself."""
        return self._view(self._first_seen)

    @cached_property
    def _first_seen(self) -> Ints:
        ids = self._at(self._side.tensor_id)
        if self.operators:
            ids = np.array(ids, np.int64)
            ids[self.operators] = -1 - np.arange(len(self.operators))
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        begins = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
        found: Ints = np.empty(len(ids), np.int64)
        found[order] = np.repeat(order[begins], np.diff(begins, append=len(ids)))
        return found

    @cached_property
    def integers(self) -> npt.NDArray[np.bool_]:
        """Whether the reference's record consists of integers, by row."""
        words = self._side.dtype.words
        return np.array([word.startswith(("int", "uint")) for word in words], bool)[self._at(self._side.dtype.codes)]

    @cached_property
    def kind_codes(self) -> Ints:
        """For each row, the number of its kind in `kind_words`."""
        return self._at(self._side.kind.codes)

    @property
    def kind_words(self) -> Sequence[str]:
        return self._side.kind.words

    @property
    def module_words(self) -> Sequence[str]:
        return self._side.module.words

    @cached_property
    def scope_begins(self) -> Ints:
        """Rows where another rank, step or micro step begins."""
        columns = [self._at(column) for column in (self._side.rank, self._side.step, self._side.pass_number)]
        changes = np.zeros(len(self._rows), bool)
        changes[:1] = True
        for column in columns:
            changes[1:] |= column[1:] != column[:-1]
        return np.flatnonzero(changes)

    @cached_property
    def operators(self) -> list[int]:
        """Rows of operators below the modules. They are sources of nothing: `judge.operators` judges them apart."""
        words = self._side.kind.words if len(self._side) else []
        if "operator" not in words:
            return []
        rows: list[int] = np.flatnonzero(self._side.kind.among(("operator",))[self._rows]).tolist()
        return rows

    @property
    def parameter_gradients(self) -> tuple[Ints, Ints, Sequence[str], Ints]:
        """Rows of all gradients of parameters, the codes of their modules, the names of these, and their steps."""
        side = self._side
        rows = np.flatnonzero(side.kind.among(("param_grad",))[self._rows])
        own = self._rows[rows]
        return rows, side.module.codes[own], side.module.words, side.step[own]

    def modules_and_steps(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the numbers of the modules of rows in `module_words`, and their steps."""
        return np.asarray(self._side.module.codes[self._rows[rows]], np.int64), self.ranks_and_steps(rows)[1]

    def ranks_and_steps(self, rows: Ints) -> tuple[Ints, Ints]:
        own = self._rows[rows]
        return np.asarray(self._side.rank[own], np.int64), np.asarray(self._side.step[own], np.int64)

    def call_numbers(self, rows: Ints) -> Ints:
        return np.asarray(self._side.call[self._rows[rows]], np.int64)

    def class_codes(self, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """Return the classes of the modules of rows as numbers, and their names."""
        return self._side.cls.codes[self._rows[rows]], self._side.cls.words

    def are_at_root(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Return which rows are of the model itself."""
        return np.array([not word for word in self.module_words], bool)[self._side.module.codes[self._rows[rows]]]

    def are_at_start(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Return which rows are of the first step that the reference has."""
        return np.asarray(self._side.step[self._rows[rows]] == self._first_step)

    def is_at_start(self, row: int) -> bool:
        """Whether a row is of the first step that the reference has."""
        return self.scope[row][1] == self._first_step

    @cached_property
    def _first_step(self) -> int:
        return int(self._side.step.min())

    def phase_of(self, row: int) -> str:
        return self._side.phase[int(self._rows[row])]

    def class_of(self, row: int) -> str:
        return self._side.cls[int(self._rows[row])]

    def row_length(self, row: int) -> int:
        """Return the length of the last axis of a record."""
        return int(self._side.row_length[int(self._rows[row])])

    def shape(self, row: int) -> tuple[int, ...]:
        """Return the shape of a record of the reference."""
        return self._side.shape(int(self._rows[row]))

    @property
    def frozen(self) -> set[str]:
        return self._side.frozen

    @cached_property
    def has_state(self) -> bool:
        """Whether any parameters or buffers are recorded."""
        return bool(self._side.kind.among(("param", "buffer"))[self._rows].any())

    @cached_property
    def kinds_in_step(self) -> dict[tuple[int, int], set[str]]:
        """Kinds of the records of a step, by rank and step."""
        found: dict[tuple[int, int], set[str]] = {}
        for (rank, step, _), kind in sorted(self.kinds_in_pass):
            found.setdefault((rank, step), set()).add(kind)
        return found

    @cached_property
    def kinds_in_pass(self) -> set[tuple[tuple[int, int, int], str]]:
        """Each rank, step and micro step, with each kind of its records."""
        if not len(self._rows):
            return set()
        columns = self._side.rank, self._side.step, self._side.pass_number, self._side.kind.codes
        found = distinct(*map(self._at, columns))
        return {((rank, step, micro), self.kind_words[kind]) for rank, step, micro, kind in found}

    def has_forward(self, row: int) -> bool:
        """Whether anything of a forward pass was paired in a row's step, on its rank."""
        return self.scope[row][:2] in self._forward_steps

    @cached_property
    def _forward_steps(self) -> set[tuple[int, int]]:
        rows = self._rows[self._side.phase.among(("forward",))[self._rows]]
        return set(zip(self._side.rank[rows].tolist(), self._side.step[rows].tolist(), strict=True))

    @cached_property
    def _is_whole(self) -> bool:
        return np.array_equal(self._rows, np.arange(len(self._rows)))

    def _at(self, column: Ints) -> Ints:
        """Return a column by row, without a copy if the side has no other rows."""
        return column[: len(self._rows)] if self._is_whole else column[self._rows]

    @staticmethod
    def _view(column: Ints) -> Sequence[int]:
        found: Sequence[int] = np.ascontiguousarray(column, np.int64).data
        return found
