"""Measure pairs of whole tensors from their files, the same two tensors once, however many records they have."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.measure.engine import Engine, Span, Task
from tensortap.compare.measure.engines import choose
from tensortap.core.dtypes import numpy_dtype
from tensortap.kernels import difference
from tensortap.kernels.pairs.reference import PairMeasure, measure

__all__ = ["Tolerances", "is_little_work", "measure_tensors"]

Tolerances = tuple[float | None, float | None]
"""rtol and atol that decide which elements count as mismatched; None is the default of the dtypes."""
Progress = Callable[[int, int], None]

# NumPy takes 0.3 ms a pair and 0.4 s a million elements; loading the compiled kernel takes 0.5 s.
_MOST_IN_NUMPY, _MOST_ELEMENTS_IN_NUMPY = 256, 1 << 18
_COMPILER = "numba"
_AHEAD = 64
"""Pairs whose bytes are requested together where each request takes time."""


def measure_tensors(
    reference: Side,
    candidate: Side,
    alignment: Alignment,
    pairs: npt.NDArray[Any],
    tolerances: Tolerances = (None, None),
    engine: Engine | None = None,
    progress: Progress | None = None,
    in_numpy: bool = False,
) -> Iterator[tuple[int, PairMeasure]]:
    """Yield (pair, measure), as they are done. Close the iterator to stop early.

    engine: where to measure; None chooses.
    in_numpy: measure without the compiled kernel, unless an `engine` is given; see `is_little_work`.
    """
    left, right = alignment.reference[pairs], alignment.candidate[pairs]
    same: dict[tuple[int, int], list[int]] = defaultdict(list)
    tensors = zip(reference.tensor_id[left].tolist(), candidate.tensor_id[right].tolist(), strict=True)
    for place, two in enumerate(tensors):
        same[two].append(place)
    groups = list(same.values())
    first = np.array([group[0] for group in groups], np.int64)
    in_files = reference.run.on_disk and candidate.run.on_disk
    straight = ~candidate.relaid[right[first]] if in_files else np.zeros(len(first), bool)
    nbytes = _bytes(reference, left[first]) + _bytes(candidate, right[first])
    in_numpy = in_numpy and in_files and engine is None
    if in_numpy:
        straight[:] = False
    done = 0
    for chosen in (np.flatnonzero(straight), np.flatnonzero(~straight)):
        report_bytes = None if progress is None else partial(_report_progress, progress, done, int(nbytes.sum()))
        spots = left[first[chosen]], right[first[chosen]]
        if straight[chosen].any():
            measured = _on_disk(reference, candidate, *spots, tolerances, engine, report_bytes)
        else:
            measured = _in_memory(reference, candidate, *spots, tolerances, report_bytes, in_numpy)
        for number, found in measured:
            for place in groups[chosen[number]]:
                yield int(pairs[place]), found
        done += int(nbytes[chosen].sum())


def is_little_work(reference: Side, alignment: Alignment, pairs: npt.NDArray[Any]) -> bool:
    """Whether NumPy measures these pairs before the compiled kernel would even be loaded.

    A process that has the compiler loaded, because it captures or checks, uses the kernel for all work. The numbers are
    the same but for the order of summation.
    """
    if _COMPILER in sys.modules:
        return False
    elements = reference.elements[alignment.reference[pairs]]
    return len(pairs) <= _MOST_IN_NUMPY and int(elements.sum()) <= _MOST_ELEMENTS_IN_NUMPY


def _report_progress(progress: Progress, before: int, whole: int, done: int) -> None:
    progress(before + done, whole)


def _bytes(side: Side, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    sizes = np.array([numpy_dtype(word).itemsize for word in side.dtype.words], np.int64)
    found: npt.NDArray[np.int64] = side.elements[rows] * sizes[side.dtype.codes[rows]] if len(rows) else rows
    return found


def _on_disk(
    reference: Side,
    candidate: Side,
    left: npt.NDArray[np.int64],
    right: npt.NDArray[np.int64],
    tolerances: Tolerances,
    engine: Engine | None,
    report_bytes: Callable[[int], None] | None,
) -> Iterator[tuple[int, PairMeasure]]:
    sizes = reference.l2[left].tolist()
    tasks = [
        Task(ours, theirs, rtol=tolerances[0], atol=tolerances[1], size=size)
        for ours, theirs, size in zip(_spans(reference, left), _spans(candidate, right), sizes, strict=True)
    ]
    return (engine or choose(tasks)).run(tasks, report_bytes)


def _in_memory(
    reference: Side,
    candidate: Side,
    left: npt.NDArray[np.int64],
    right: npt.NDArray[np.int64],
    tolerances: Tolerances,
    report_bytes: Callable[[int], None] | None,
    in_numpy: bool,
) -> Iterator[tuple[int, PairMeasure]]:
    done = 0
    for number, (ours, theirs) in enumerate(zip(left.tolist(), right.tolist(), strict=True)):
        if number % _AHEAD == 0:
            reference.prefetch(left[number : number + _AHEAD])
            candidate.prefetch(right[number : number + _AHEAD])
        arrays = reference.array(ours), candidate.array(theirs)
        size = float(reference.l2[ours])
        if in_numpy:
            yield number, measure(*arrays, rtol=tolerances[0], atol=tolerances[1])
        else:
            yield number, difference(*arrays, rtol=tolerances[0], atol=tolerances[1], size=size)
        done += sum(array.nbytes for array in arrays)
        if report_bytes is not None:
            report_bytes(done)


def _spans(side: Side, rows: npt.NDArray[np.int64]) -> Iterator[Span]:
    dtypes = side.dtype.at(rows)
    for row, dtype, (path, offset, nbytes) in zip(rows.tolist(), dtypes, side.locations(rows), strict=True):
        yield Span(path, dtype, side.shape(row), offset, nbytes, side.assembly(row))
