"""Plain data for reports from an open run. Works on whole columns, so that a million records are quick."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core import statistics
from tensortap.core.arguments import all_in_words, read
from tensortap.core.placement import in_words
from tensortap.core.records import KINDS, PHASES, Record, display_name
from tensortap.core.spelling import close_names
from tensortap.errors import UsageError
from tensortap.report.facts import RunFacts
from tensortap.report.wording import numbers_in_short
from tensortap.store import Run
from tensortap.store.format import decode
from tensortap.store.query import Filter

__all__ = [
    "Choice",
    "Chosen",
    "calls_of",
    "choose",
    "facts_of",
    "layouts_of",
    "mesh_in_words",
    "parse_steps_filter",
    "sorts",
    "suggestion",
]

_NAMES = ("seq", "step", "micro", "call", "module", "kind", "dtype")
_RENAMES = 3
_CHUNK = 1024
_NO_SKETCH = np.empty(0, np.float32)


@dataclass(frozen=True)
class Choice:
    """The records to select and their order. Raise UsageError for an unknown kind, phase or column."""

    modules: Sequence[str] = ()
    kinds: Sequence[str] = ()
    phases: Sequence[str] = ()
    steps: str = ""
    ranks: Sequence[int] = ()
    nonfinite: bool = False
    sort: str = "seq"

    def __post_init__(self) -> None:
        _check("--kind", self.kinds, KINDS)
        _check("--phase", self.phases, PHASES)
        _check("--sort", [self.sort.removeprefix("-")], sorts())

    def filters(self, run: Run) -> dict[str, Any]:
        """Return the filters for the store, where the name of the root is empty."""
        return {
            "module": ["" if name == "(root)" else name for name in self.modules] or None,
            "kind": list(self.kinds) or None,
            "phase": list(self.phases) or None,
            "step": parse_steps_filter(self.steps, run.steps) if self.steps else None,
            "nonfinite": self.nonfinite,
        }


@dataclass(frozen=True)
class Chosen:
    """Selected records by rank and row; `records` reads them."""

    run: Run
    ranks: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    """Rows of the index of the rank."""
    _sketches: dict[int, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def records(self, limit: int = 0, sketch: bool = False) -> Iterator[Record]:
        """Yield the first `limit` records; 0 means all."""
        end = min(limit or len(self), len(self))
        for at in range(0, end, _CHUNK):
            yield from self._chunk(slice(at, min(at + _CHUNK, end)), sketch)

    def _chunk(self, part: slice, sketch: bool) -> list[Record]:
        ranks, rows = self.ranks[part], self.rows[part]
        found: list[Record | None] = [None] * len(rows)
        for rank in np.unique(ranks).tolist():
            places = np.flatnonzero(ranks == rank)
            taken = self.run.columns(rank).take(rows[places])
            sketches = self._sketches_of(rank, rows[places]) if sketch else [_NO_SKETCH] * len(places)
            records = decode(taken, rank, sketches, self.run.placements(rank))
            for place, record in zip(places.tolist(), records, strict=True):
                found[place] = record
        return [record for record in found if record is not None]

    def _sketches_of(self, rank: int, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.float32]]:
        if rank not in self._sketches:
            self._sketches[rank] = self.run.sketches(rank)
        matrix, which = self._sketches[rank]
        return [matrix[at] if at >= 0 else _NO_SKETCH for at in which[rows].tolist()]


def sorts() -> tuple[str, ...]:
    """Return the columns that records can be sorted by."""
    numbers = (each.name for each in statistics.listed() if each.show.form != "digest")
    return (*_NAMES, "class", *numbers)


def choose(run: Run, choice: Choice) -> Chosen:
    """Select the records that pass, in the order of the choice; ties are in execution order."""
    if missing := sorted(set(choice.ranks) - set(run.ranks)):
        raise UsageError(f"--rank {missing[0]}: {run.path} has {_known(run.ranks)}")
    chosen = Filter(**choice.filters(run))
    ranks = [rank for rank in run.ranks if not choice.ranks or rank in choice.ranks]
    rows = [chosen.rows(run.columns(rank)) for rank in ranks]
    if not ranks:
        return Chosen(run, np.empty(0, np.int64), np.empty(0, np.int64))
    all_ranks = np.repeat(ranks, [len(part) for part in rows])
    all_rows = np.concatenate(rows)
    if choice.sort == "seq":  # by rank, then in execution order
        return Chosen(run, all_ranks, all_rows)
    name = choice.sort.removeprefix("-")
    values = np.concatenate([_values(run.index(r), name)[part] for r, part in zip(ranks, rows, strict=True)])
    if values.dtype == object:  # names: ranks in the alphabet can be negated
        values = np.unique(values.astype(str), return_inverse=True)[1]
    order = np.argsort(-values if choice.sort.startswith("-") else values, kind="stable")  # NaN last, both ways
    return Chosen(run, all_ranks[order], all_rows[order])


def suggestion(run: Run, patterns: Sequence[str]) -> str:
    """Suggest module names for patterns that match nothing."""
    names = {display_name(row.module) for rows in run.coverage.values() for row in rows}
    close = close_names(patterns, sorted(names))
    return f"did you mean {', '.join(close)}?" if close else ""


def facts_of(run: Run) -> RunFacts:
    """Return everything about the run except its records."""
    indexes = [run.columns(rank) for rank in run.ranks]
    return RunFacts(
        path=str(run.path),
        info=run.info,
        finished=run.finished,
        steps=run.steps,
        ranks=run.ranks,
        records=len(run),
        tensors=sum(len(np.unique(index.column("tensor").to_numpy())) for index in indexes),
        kept=sum(index.num_rows - index.column("file").null_count for index in indexes),
        bytes_on_disk=run.source.stored_bytes(),
        notices=run.notices,
        coverage=run.coverage,
        calls=_calls(run),
        mesh=mesh_in_words(run),
    )


def mesh_in_words(run: Run) -> str:
    """Return the axes of the run's processes and their sizes; empty if they are not known."""
    meshes = [mesh for rank in run.ranks if (mesh := run.mesh(rank)) is not None]
    if not meshes:
        return ""
    axes = " × ".join(f"{name} {size}" for name, size in zip(meshes[0].names, meshes[0].sizes, strict=True))
    renamed = sorted({f"{own} → {new}" for rank in run.ranks for own, new in run.renames(rank).items() if "." in own})
    return axes + (f"; renamed: {', '.join(renamed[:_RENAMES])}{', …' * (len(renamed) > _RENAMES)}" if renamed else "")


def layouts_of(run: Run, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the placements of the records in words: each identity once, with the parts of all ranks."""
    found: dict[str, dict[str, list[int]]] = {}
    for record in records:
        if record.placement is not None:
            name = f"{display_name(record.key.module)} {record.key.kind} {record.key.path}"
            found.setdefault(name, {}).setdefault(in_words(record.placement), []).append(record.rank)
    return [
        (name, "; ".join(f"rank {', '.join(map(str, sorted(set(ranks))))} {words}" for words, ranks in parts.items()))
        for name, parts in found.items()
    ]


def calls_of(run: Run, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the modules of the records with each distinct set of plain arguments of their calls, in words."""
    found = ((r.key.module, run.arguments(r)) for r in records)
    return list(dict.fromkeys((module, all_in_words(given)) for module, given in found if given))


def _calls(run: Run) -> list[tuple[str, str]]:
    """Return each module with the plain arguments of its first call, in words."""
    first: dict[str, str] = {}
    others: Counter[str] = Counter()
    for rank in run.ranks:
        for called in run.calls(rank) or ():
            if called.module not in first:
                first[called.module] = all_in_words(read(called.arguments))
            else:
                others[called.module] += 1
    changed = {module: f"; changed {times} time{'s' * (times > 1)}" for module, times in others.items()}
    return [(module, words + changed.get(module, "")) for module, words in first.items()]


def parse_steps_filter(text: str, known: Sequence[int]) -> list[int]:
    """Return the steps of the run that "3", "0,5", "10-20" or "last" selects."""
    meant: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if part == "last":
            meant.update(known[-1:])
        elif first.isdecimal() and (last or first).isdecimal():
            meant.update(step for step in known if int(first) <= step <= int(last or first))
        else:
            raise UsageError(f'--step {text}: {part or "nothing"!r} is not a step; use 3, 0,5, 10-20 or "last"')
    return sorted(meant)


def _values(index: Any, name: str) -> npt.NDArray[Any]:
    def column(name: str) -> npt.NDArray[Any]:
        return np.asarray(index.column("cls" if name == "class" else name).to_numpy())

    formula = statistics.formula_of(name)
    return column(name) if formula is None else np.asarray(formula(column))


def _check(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for word in given:
        if word not in known:
            close = difflib.get_close_matches(word, known, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"{option} {word}: {hint}use one of {', '.join(known)}")


def _known(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers_in_short(ranks)}"
