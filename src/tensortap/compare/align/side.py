"""One side of a comparison as columns: what alignment, measuring and judging need, a NumPy array each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tensortap.compare.join.bands import Assembly
from tensortap.compare.join.source import joined_source
from tensortap.core.records import ALL_FROZEN, KINDS, PHASES, Key, display_name
from tensortap.core.sketches import FULL, fold
from tensortap.store import Run
from tensortap.store.compact import compact, joined
from tensortap.store.query import Filter

__all__ = ["Bools", "Ints", "Names", "Scope", "Side", "has_evaluation", "has_operators", "hash_of_shape"]

TRAINING_PHASES = tuple(phase for phase in PHASES if phase != "eval")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_HASH = np.uint64(0x9E3779B97F4A7C15)
_OF_RUN = ("run", "is_selection", "without_evaluation", "without_operators", "ranks", "_chosen")
"""Attributes of a side that no record changes."""


@dataclass(frozen=True)
class Names:
    """A column of repeated strings: a code for each row, and the word of each code."""

    codes: Ints
    words: list[str]

    def __getitem__(self, row: int) -> str:
        return self.words[int(self.codes[row])]

    def renamed(self, rename: Callable[[str], str]) -> Names:
        return Names(self.codes, [rename(word) for word in self.words])

    def at(self, rows: Ints) -> list[str]:
        return [self.words[code] for code in self.codes[rows].tolist()]

    def among(self, words: Collection[str]) -> Bools:
        """Return for each row whether it is one of these."""
        return np.array([word in words for word in self.words], bool)[self.codes]


@dataclass(frozen=True)
class Scope:
    """The selection of a run's records that take part in a comparison."""

    modules: str | Collection[str] | None = None
    kinds: str | Collection[str] | None = None
    steps: Collection[int] | None = None
    ranks: Collection[int] | None = None
    state_only: bool = False
    """Against a checkpoint: only parameters and buffers as they were before the first step that takes part."""
    rename: Callable[[str], str] | None = None
    """The patterns of `modules` apply to names after this rename."""
    training_only: bool = False
    """Leave out evaluation, because the other side has none."""
    without_operators: bool = False
    """Leave out operators, because the other side has none, or has them on other ranks or under other names."""


@dataclass(frozen=True)
class _MatchingNames:
    """The names that match patterns; "(root)" is the root, whose name is empty."""

    patterns: Collection[str]
    rename: Callable[[str], str] | None

    def __contains__(self, name: object) -> bool:
        known = str(name) if self.rename is None else self.rename(str(name))
        return any(fnmatchcase(known, pattern) or display_name(known) == pattern for pattern in self.patterns)


def has_evaluation(run: Run, ranks: Collection[int] | None = None) -> bool:
    """Return whether a run, or some of its ranks, has records of an evaluation. No other index is read."""
    chosen = run.ranks if ranks is None else [rank for rank in run.ranks if rank in ranks]
    return any("eval" in pc.unique(run.columns(rank).column("phase")).to_pylist() for rank in chosen)


def has_operators(run: Run, ranks: Collection[int] | None = None) -> bool:
    """Return whether a run, or some of its ranks, has records of operators."""
    chosen = run.ranks if ranks is None else [rank for rank in run.ranks if rank in ranks]
    return any("operator" in pc.unique(run.columns(rank).column("kind")).to_pylist() for rank in chosen)


class Side:
    """The records of a run that take part, in order of rank and execution."""

    _read_ranks: Set[int] = frozenset()
    """Ranks of which sketches were read."""
    _scales: Mapping[int, float] = MappingProxyType({})
    """Factors of records that were recorded in another scale, by row."""

    def __init__(self, run: Run, scope: Scope) -> None:
        self.run = run
        patterns = (scope.modules,) if isinstance(scope.modules, str) else scope.modules
        matching = None if patterns is None else _MatchingNames(patterns, scope.rename)
        steps = None if run.is_checkpoint else scope.steps  # a checkpoint belongs to no step
        phases = TRAINING_PHASES if scope.training_only and has_evaluation(run, scope.ranks) else None
        kinds = (scope.kinds,) if isinstance(scope.kinds, str) else scope.kinds
        self.without_operators = scope.without_operators and has_operators(run, scope.ranks)
        """Whether records of operators were left out."""
        if self.without_operators:
            kinds = [kind for kind in kinds or KINDS if kind != "operator"]
        chosen = Filter(module=matching, kind=kinds, step=steps, phase=phases)
        everything = all(chosen is None for chosen in (scope.modules, kinds, steps, phases))
        self._chosen: tuple[Container[Any] | None, ...] = (matching, kinds, steps, phases)
        self.is_selection = scope.modules is not None or scope.kinds is not None
        """Whether modules or kinds were left out on purpose."""
        self.without_evaluation = phases is not None
        """Whether records of an evaluation were left out."""
        self.ranks = [rank for rank in run.ranks if scope.ranks is None or rank in scope.ranks]
        whole = run.join_columns(self.ranks)
        tables = [run.columns(rank) for rank in self.ranks]
        rows = [np.arange(table.num_rows) if everything else chosen.rows(table) for table in tables]
        if tables and not everything:
            parts = zip(tables, rows, strict=True)
            whole = joined([compact(table.take(pa.array(places))) for table, places in parts])
        self.table = whole
        """Columns of the index without its sketches, as `store.compact` holds them."""
        self.row = rows[0] if len(rows) == 1 else np.concatenate(rows) if rows else np.empty(0, np.int64)
        """Row in the index of its rank."""
        self.rank = _ranks(self.ranks, [len(part) for part in rows])
        if scope.state_only and len(self):
            self._keep_state()

    def __len__(self) -> int:
        return len(self.row)

    def takes(self, key: Key) -> bool:
        """Whether a record of this identity would take part."""
        chosen = self._chosen
        return all(
            wanted is None or value in wanted
            for wanted, value in zip(chosen, (key.module, key.kind, key.step, key.phase), strict=True)
        )

    def __getattr__(self, name: str) -> Any:
        """Return a column of numbers, read on first use."""
        if name.startswith("_") or name == "table" or name not in self.table.column_names:
            raise AttributeError(name)
        column = np.asarray(_unbroken(self.table.column(name)).to_numpy(zero_copy_only=False))
        setattr(self, name, column)
        return column

    def replace(self, table: Any, row: Ints, rank: Ints) -> None:
        """Replace all records by others of the same run; what was read from the old ones is forgotten."""
        kept = {name: vars(self)[name] for name in _OF_RUN}
        vars(self).clear()
        vars(self).update(kept, table=table, row=row, rank=rank)

    def release_derived(self) -> None:
        """Release columns that follow from others. They are worked out again if they are asked for."""
        for name in ("shape_hash", "row_length", "pass_number"):
            vars(self).pop(name, None)

    def _keep_state(self) -> None:
        """Keep the state before the first step: a checkpoint knows neither steps nor which tensors are buffers."""
        state = np.isin(self.table.column("kind").to_numpy(), ("param", "buffer")) & (self.call == 0)
        state &= self.step == (self.step[state].min() if state.any() else 0)
        self.table = compact(self.table.filter(pa.array(state)))
        self.row, self.rank = self.row[state], self.rank[state]
        for name in ("step", "micro"):
            setattr(self, name, np.zeros(len(self), np.int64))
        self.kind = Names(np.zeros(len(self), np.int64), ["param"])
        for name in ("call",):
            delattr(self, name)

    def names(self, column: str) -> Names:
        if not len(self):
            return Names(np.empty(0, np.int64), [])
        coded = _unbroken(self.table.column(column))
        codes, words = coded.indices.to_numpy(), coded.dictionary.to_pylist()
        if np.count_nonzero(np.bincount(codes, minlength=len(words))) == len(words):
            return Names(codes, words)
        used, first, codes = np.unique(codes, return_index=True, return_inverse=True)
        order = np.argsort(first)  # words that were left out leave gaps
        return Names(np.argsort(order)[codes], [words[code] for code in used[order].tolist()])

    @cached_property
    def module(self) -> Names:
        return self.names("module")

    @cached_property
    def phase(self) -> Names:
        return self.names("phase")

    @cached_property
    def pass_number(self) -> Ints:
        """The micro step; forwards of an evaluation count down from -1."""
        found: Ints = np.where(self.phase.among(("eval",)), -1 - self.micro, self.micro) if len(self) else self.micro
        return found

    @cached_property
    def kind(self) -> Names:
        return self.names("kind")

    @cached_property
    def path(self) -> Names:
        return self.names("path")

    @cached_property
    def cls(self) -> Names:
        return self.names("cls")

    @cached_property
    def dtype(self) -> Names:
        return self.names("dtype")

    @cached_property
    def called(self) -> frozenset[str]:
        """The modules of which a call is recorded. Others only hold parameters that the modules around them read."""
        if not len(self):
            return frozenset()
        codes = np.unique(self.module.codes[self.kind.among(("input", "output"))])
        return frozenset(self.module.words[code] for code in codes.tolist())

    def may_have(self, module: str) -> bool:
        """Return whether the model may have a module, called or not. A run in progress does not list its modules."""
        return not self._modules or module in self._modules

    @cached_property
    def _modules(self) -> frozenset[str]:
        return frozenset(row.module for rows in self.run.coverage.values() for row in rows)

    @cached_property
    def frozen(self) -> set[str]:
        """Modules whose parameters are all frozen, so that they get no gradients."""
        return {row.module for rows in self.run.coverage.values() for row in rows if row.reason == ALL_FROZEN}

    @cached_property
    def kept(self) -> Bools:
        """Whether the tensor's bytes were stored."""
        if not len(self):
            return np.empty(0, bool)
        return np.asarray(self.table.column("file").is_valid().to_numpy())

    @cached_property
    def tensor_id(self) -> Ints:
        """The tensor's number, made unique over ranks."""
        found: Ints = self.tensor + (self.rank << 40) if self.rank.any() else self.tensor
        return found

    @cached_property
    def shapes(self) -> Any:
        return _unbroken(self.table.column("shape")) if len(self) else pa.array([], pa.list_(pa.int64()))

    @cached_property
    def shape_hash(self) -> npt.NDArray[np.uint64]:
        """Equal for equal shapes: a polynomial in the dimensions, so that whole columns compare at once."""
        column = self.shapes
        offsets = column.offsets.to_numpy().astype(np.int64)
        values = column.values.to_numpy().astype(np.uint64)
        lengths = np.diff(offsets)
        found: npt.NDArray[np.uint64] = lengths.astype(np.uint64)
        for place in range(int(lengths.max(initial=0))):
            having = np.flatnonzero(lengths > place)
            found[having] = found[having] * _HASH + values[offsets[having] + place] + np.uint64(1)
        return found

    @cached_property
    def row_length(self) -> Ints:
        """Elements along the last dimension that has more than one."""
        offsets = self.shapes.offsets.to_numpy().astype(np.int64)
        values = self.shapes.values.to_numpy()
        lengths = np.diff(offsets)
        found: Ints = np.ones(len(lengths), np.int64)
        for place in range(int(lengths.max(initial=0))):
            having = np.flatnonzero(lengths > place)
            size = values[offsets[having] + place]
            found[having] = np.where(size == 1, found[having], size)
        return found

    @cached_property
    def relaid(self) -> Bools:
        """Whether a tensor is read in another layout than it is stored in; see `translated`."""
        return np.zeros(len(self), bool)

    @cached_property
    def reordered(self) -> Bools:
        """Whether the conversion reorders the elements, so that digest and sketch do not apply."""
        joined = joined_source(self.run)
        if joined is None or not joined.without_positions:
            return np.zeros(len(self), bool)
        found: Bools = np.isin(joined.groups[self.row], list(joined.without_positions))
        return found

    @cached_property
    def guessed(self) -> Bools:
        """Whether the layout of a record over ranks is a guess from shapes."""
        joined = joined_source(self.run)
        if joined is None or not joined.guessed:
            return np.zeros(len(self), bool)
        found: Bools = np.isin(joined.groups[self.row], list(joined.guessed))
        return found

    @cached_property
    def pieced(self) -> Bools:
        """Whether a tensor is stored in several pieces, by several ranks."""
        joined = joined_source(self.run)
        return np.zeros(len(self), bool) if joined is None else joined.pieced[self.row]

    def assembly(self, row: int) -> Assembly | None:
        """Return the pieces of a tensor; None if it is stored in one."""
        joined = joined_source(self.run)
        if joined is None or not self.pieced[row]:
            return None
        found = joined.assembly(int(self.row[row]))
        return replace(found, weight=found.weight * self._scales.get(row, 1.0))

    def rescale(self, rows: Ints, factor: float) -> None:
        """Multiply records of a joined run by a factor, wherever their values are read. Bits are then unknown."""
        for name in ("min", "max", "mean", "std", "l1", "l2"):
            column = np.array(getattr(self, name), np.float64)
            column[rows] *= factor
            setattr(self, name, column)
        digest = np.array(getattr(self, "digest"))  # noqa: B009 - a column, which only __getattr__ knows
        digest[rows] = ~digest[rows]
        pieced = self.pieced.copy()
        pieced[rows] = True
        vars(self).update(digest=digest, pieced=pieced)
        self._scales = {**self._scales, **dict.fromkeys(rows.tolist(), factor)}

    def shape(self, row: int) -> tuple[int, ...]:
        return tuple(self.shapes[row].as_py())

    def key(self, row: int) -> Key:
        return Key(
            int(self.step[row]),
            int(self.micro[row]),
            self.phase[row],
            self.module[row],
            int(self.call[row]),
            self.kind[row],
            self.path[row],
        )

    @cached_property
    def has_sketch(self) -> Bools:
        """Whether a sketch of the record's tensor is known."""
        found = np.zeros(len(self), bool)
        for rank in self.ranks:
            here = self._of_rank(rank)
            found[here] = self.run.sketch_rows(rank)[self.row[here]] >= 0
        return found

    @cached_property
    def sketch_size(self) -> int:
        """Number of sums of the smallest sketch of any rank; `FULL` if there is none."""
        sizes = []
        for rank in self.ranks:
            first = np.flatnonzero(self.run.sketch_rows(rank) >= 0)[:1]
            if len(first):
                sizes.append(self.run.sketches_at(rank, first).shape[1])
            if len(self.ranks) > 1:
                self.run.release_sketches(rank)
        return min((size for size in sizes if size), default=FULL)

    def sketches_at(self, rows: Ints, size: int | None = None) -> npt.NDArray[np.float32]:
        """Return the sketches of records as a matrix of `size` sums each. All of them must have one.

        They are read in batches: records that are near to each other are read together.
        """
        size = self.sketch_size if size is None else size
        if len(self.ranks) == 1:
            self._read_ranks = {self.ranks[0]}
            found = fold(self.run.sketches_at(self.ranks[0], self.row[rows]), size)
        else:
            found = np.empty((len(rows), size), np.float32)
            ranks = self.rank[rows]
            wanted = np.unique(ranks).tolist()
            self.release_sketches(keep=wanted)
            for rank in wanted:
                here = np.flatnonzero(ranks == rank)
                found[here] = fold(self.run.sketches_at(rank, self.row[rows[here]]), size)
        if self._scales:
            found = found * np.array([self._scales.get(row, 1.0) for row in rows.tolist()], np.float32)[:, None]
        return found

    def release_sketches(self, keep: Collection[int] = ()) -> None:
        """Release the sketches that were read, but for some ranks: many ranks keep many batches."""
        for rank in self._read_ranks - set(keep):
            self.run.release_sketches(rank)
        self._read_ranks = set(keep)

    def sketches(self) -> tuple[npt.NDArray[np.float32], Ints]:
        """Return all sketches as rows of a matrix, and the row of each record; -1 if it has none."""
        rows = np.flatnonzero(self.has_sketch)
        which = np.full(len(self), -1)
        which[rows] = np.arange(len(rows))
        return self.sketches_at(rows) if len(rows) else np.empty((0, FULL), np.float32), which

    def _of_rank(self, rank: int) -> Any:
        return slice(None) if len(self.ranks) == 1 else np.flatnonzero(self.rank == rank)

    def locations(self, rows: Ints) -> list[tuple[str, int, int]]:
        """Return (path, offset, bytes) of records whose bytes were stored."""
        taken = self.table.select(["file", "offset", "nbytes"]).take(pa.array(rows)).to_pydict()
        ranks = self.rank[rows].tolist()
        files = [self.run.source.address(rank, name) for rank, name in zip(ranks, taken["file"], strict=True)]
        return list(zip(files, taken["offset"], taken["nbytes"], strict=True))

    def prefetch(self, rows: Ints) -> None:
        """Prepare for loading these tensors soon, where each request takes time."""
        if self.run.on_disk and not isinstance(self.run.path, Path):
            self.run.source.prefetch([self.run.at(int(self.rank[row]), int(self.row[row])) for row in rows])

    def array(self, row: int) -> npt.NDArray[Any]:
        """Load the tensor of one record."""
        found = self.run.load(self.run.at(int(self.rank[row]), int(self.row[row])))
        if row not in self._scales:
            return found
        return (found.astype(np.float64) * self._scales[row]).astype(found.dtype)


def _ranks(ranks: Sequence[int], lengths: Sequence[int]) -> Ints:
    """Return the rank of each row. That of a single rank is one number, whatever the number of rows."""
    if len(ranks) == 1:
        return np.broadcast_to(np.int64(ranks[0]), lengths[0])
    return np.repeat(np.array(ranks, np.int64), lengths)


def _unbroken(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def hash_of_shape(shape: tuple[int, ...]) -> int:
    """Return the number that `Side.shape_hash` has for a shape."""
    found = len(shape)
    for size in shape:
        found = (found * int(_HASH) + size + 1) & 0xFFFFFFFFFFFFFFFF
    return found
