"""The table of pairs, built from the columns of both sides, the measures and the judgement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.measure.measures import Measures
from tensortap.compare.say.columns import pairs_schema
from tensortap.compare.translate.translated import Translated
from tensortap.core import statistics
from tensortap.core.records import WRONG_STATUSES, Finding, TruthErrors

__all__ = ["table_of"]

Taking = Callable[[Any], Any]
"""Returns a column of a side by pair."""
_MEASURED = ("max_abs", "reference_value", "candidate_value", "max_ulp", "mismatched", "row_rel_l2")
_NOTHING = ("max_abs", "max_ulp", "mismatched", "row_rel_l2")  # 0 where both sides are equal


def table_of(
    reference: Side,
    candidate: Side,
    alignment: Alignment,
    measures: Measures,
    judgement: Judgement,
    births: Sequence[Finding],
    truth: Mapping[int, TruthErrors] | None = None,
) -> Any:
    """Build the table. `truth` has the distances of both sides from a truth, by pair."""
    left, right = alignment.reference, alignment.candidate
    count = len(left)
    schema = pairs_schema()
    if not count:
        return schema.empty_table()
    # Functions, which are called one after the other: what a column is made from is released before the next one.
    columns: dict[str, Callable[[], Any]] = {
        name: partial(lambda name: alignment.of_reference(getattr(reference, name)), name)
        for name in ("rank", "seq", "step", "micro", "call")
    }
    for name in ("phase", "module", "kind", "path", "cls"):
        columns[name] = partial(lambda name: _words(getattr(reference, name), alignment.of_reference), name)
    columns |= {
        "dtype_reference": lambda: _words(reference.dtype, alignment.of_reference),
        "dtype_candidate": lambda: _words(candidate.dtype, alignment.of_candidate),
        "shape_reference": lambda: _shapes(reference, left, alignment.is_consecutive[0]),
        "shape_candidate": lambda: _shapes(candidate, right, alignment.is_consecutive[1]),
        "status": lambda: _coded(judgement.status),
        "birth": lambda: _marks(count, births),
        "cause": lambda: _texts(count, births, lambda birth: birth.cause.value),
        "container": lambda: _texts(count, births, lambda birth: birth.container),
        "truth_reference": lambda: _nullable(_of_truth(count, truth or {}, lambda errors: errors.reference)),
        "truth_candidate": lambda: _nullable(_of_truth(count, truth or {}, lambda errors: errors.candidate)),
        "tolerance": lambda: judgement.tolerance,
        "row_tolerance": lambda: judgement.row_tolerance,
        "rule": lambda: _coded(judgement.rule),
        "exact": lambda: measures.exact,
        "rel_l2": lambda: _nullable(measures.rel_l2),
        "rel_l2_bar": lambda: _nullable(measures.rel_l2_bar),
        "cosine": lambda: _nullable(measures.cosine),
    }
    columns |= {name: partial(_measured, count, measures, name) for name in _MEASURED}
    columns |= {name: partial(_indices, count, measures, name) for name in ("max_abs_index", "row_index")}
    takers = ("reference", reference, alignment.of_reference), ("candidate", candidate, alignment.of_candidate)
    for side_name, side, take in takers:
        get = partial(_statistic, measures.sides[side_name], side, take, count)
        for each in statistics.listed():
            if each.is_added:
                columns[f"{each.name}_{side_name}"] = partial(_added, get, each.name)
            elif each.show.sides:
                columns[f"{each.name}_{side_name}"] = partial(get, each.name)
    for name in ("module", "path"):
        columns[f"{name}_candidate"] = partial(_mapped, candidate, right, name, columns[name])
    columns["layout"] = partial(_layouts, candidate, right)
    unknown = _unknown(count)
    return pa.table([_typed(columns[field.name](), field.type, unknown) for field in schema], schema=schema)


def _added(get: Callable[[str], Any], name: str) -> Any:
    """Return a statistic that was registered later, which may not be known."""
    return _nullable(np.asarray(get(name), np.float64))


def _statistic(measured: Mapping[str, Any], side: Side, take: Taking, count: int, name: str) -> Any:
    """Return a column of a side: as measured, by its formula, or as the index has it."""
    if name in measured:
        return measured[name]
    formula = statistics.formula_of(name)
    if formula is not None:
        return formula(partial(_statistic, measured, side, take, count))
    column = getattr(side, name, None)  # a run that was opened before a statistic was registered has no column for it
    return np.full(count, np.nan) if column is None else take(column)


def _typed(column: Any, kind: Any, unknown: Any) -> Any:
    if isinstance(column, pa.Array) and column.null_count == len(column):
        return unknown(kind)
    return column.cast(kind) if isinstance(column, pa.Array) else pa.array(column, kind)


def _unknown(count: int) -> Callable[[Any], Any]:
    """Return a function of a type that returns a column of nulls. All of these columns share one buffer."""
    zeros = pa.py_buffer(np.zeros(count + 1, np.int64))

    def column(kind: Any) -> Any:
        if pa.types.is_list(kind):
            return pa.Array.from_buffers(kind, count, [zeros, zeros], count, children=[pa.array([], kind.value_type)])
        return pa.Array.from_buffers(kind, count, [zeros] * (3 if pa.types.is_string(kind) else 2), count)

    return column


def _coded(words: Sequence[str]) -> Any:
    codes = {word: code for code, word in enumerate(dict.fromkeys(words))}
    numbers = np.fromiter(map(codes.__getitem__, words), np.int32, len(words))
    return pa.DictionaryArray.from_arrays(pa.array(numbers), pa.array(list(codes), pa.string()))


def _words(names: Any, take: Taking) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array(take(names.codes)), pa.array(names.words))


def _shapes(side: Side, rows: Any, consecutive: bool) -> Any:
    return side.shapes.slice(0, len(rows)) if consecutive else side.shapes.take(pa.array(rows))


def _nullable(numbers: Any) -> Any:
    unknown = np.isnan(numbers)
    if not unknown.any():
        return pa.array(numbers)  # without a copy
    return pa.nulls(len(numbers), pa.float64()) if unknown.all() else pa.array(numbers, mask=unknown)


def _mapped(candidate: Side, rows: Any, name: str, reference: Callable[[], Any]) -> Any:
    """Return the candidate's own names where they differ from the reference's."""
    if not isinstance(candidate, Translated):
        return pa.nulls(len(rows), pa.string())
    origins = candidate.origin[rows]
    words = _words(getattr(candidate.own, name), lambda codes: codes[origins])
    theirs, ours = words.cast(pa.string()), reference().cast(pa.string())
    return pc.if_else(pc.equal(theirs, ours), pa.scalar(None, pa.string()), theirs)


def _layouts(candidate: Side, rows: Any) -> Any:
    """Return the layouts in which the candidate's tensors are read, where they are stored in another one."""
    if not isinstance(candidate, Translated):
        return pa.nulls(len(rows), pa.string())
    relaid = candidate.relaid[rows]
    layouts = [
        candidate.reading(row).words() or None if there else None for row, there in zip(rows, relaid, strict=True)
    ]
    return pa.array(layouts, pa.string())


def _marks(count: int, births: Sequence[Finding]) -> Any:
    marks = np.zeros(count, bool)
    marks[[birth.row for birth in births if birth.row is not None and birth.status in WRONG_STATUSES]] = True
    return marks


def _of_truth(count: int, truth: Mapping[int, TruthErrors], number: Callable[[TruthErrors], float]) -> Any:
    numbers = np.full(count, np.nan)
    for pair, errors in truth.items():
        numbers[pair] = number(errors)
    return numbers


def _texts(count: int, births: Sequence[Finding], text_of: Callable[[Finding], str | None]) -> Any:
    """Return a column that is null but for the rows of births."""
    found = {birth.row: text for birth in births if birth.row is not None and (text := text_of(birth)) is not None}
    if not found:
        return pa.nulls(count, pa.string())
    words = list(dict.fromkeys(found.values()))
    codes = np.full(count, -1, np.int32)
    codes[list(found)] = [words.index(text) for text in found.values()]
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), pa.array(words, pa.string()))


def _measured(count: int, measures: Measures, name: str) -> Any:
    """Return a number that only whole tensors have: known for equal pairs, and for measured ones."""
    numbers = np.where(measures.equal, 0.0, np.nan) if name in _NOTHING else np.full(count, np.nan)
    for pair, found in measures.differences.items():
        numbers[pair] = getattr(found, name)
    return _nullable(numbers)


def _indices(count: int, measures: Measures, name: str) -> Any:
    """Return a column of indices by pair, null where there is none."""
    if not measures.differences:
        return pa.nulls(count, pa.list_(pa.int64()))
    known = {pair: getattr(found, name) for pair, found in measures.differences.items()}
    return pa.array([known.get(pair) for pair in range(count)], pa.list_(pa.int64()))
