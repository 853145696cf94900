"""Pairs of whole tensors, measured where they lie; the same two tensors once, however many records saw them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.measure.device import OnDevice
from tensortap.compare.measure.engine import Engine, ProcessPool, Serial, Span, Task, choose
from tensortap.core.dtypes import numpy_dtype
from tensortap.kernels import difference
from tensortap.kernels.pairs.device import PairDevice
from tensortap.kernels.pairs.reference import PairMeasure

__all__ = ["Tolerances", "measure_tensors"]

Tolerances = tuple[float | None, float | None]
"""rtol and atol that decide which elements count as mismatched; None is the usual one of the dtypes."""
Progress = Callable[[int, int], None]


def measure_tensors(
    reference: Side,
    candidate: Side,
    alignment: Alignment,
    pairs: npt.NDArray[Any],
    tolerances: Tolerances = (None, None),
    workers: int | None = None,
    progress: Progress | None = None,
    device: PairDevice | None = None,
) -> Iterator[tuple[int, PairMeasure]]:
    """(pair, how far it is apart), as they are done. Close the iterator to stop early."""
    left, right = alignment.reference[pairs], alignment.candidate[pairs]
    same: dict[tuple[int, int], list[int]] = defaultdict(list)
    tensors = zip(reference.tensor_id[left].tolist(), candidate.tensor_id[right].tolist(), strict=True)
    for place, two in enumerate(tensors):
        same[two].append(place)
    groups = list(same.values())
    first = np.array([group[0] for group in groups], np.int64)
    in_files = reference.run.on_disk and candidate.run.on_disk
    straight = ~candidate.laid[right[first]] if in_files else np.zeros(len(first), bool)
    nbytes = _bytes(reference, left[first]) + _bytes(candidate, right[first])
    engine = _engine(workers, device)
    done = 0
    for chosen in (np.flatnonzero(straight), np.flatnonzero(~straight)):
        told = None if progress is None else partial(_tell, progress, done, int(nbytes.sum()))
        spots = left[first[chosen]], right[first[chosen]]
        if straight[chosen].any():
            measured = _on_disk(reference, candidate, *spots, tolerances, engine, told)
        else:
            measured = _in_memory(reference, candidate, *spots, tolerances, told)
        for number, measure in measured:
            for place in groups[chosen[number]]:
                yield int(pairs[place]), measure
        done += int(nbytes[chosen].sum())


def _tell(progress: Progress, before: int, whole: int, done: int) -> None:
    progress(before + done, whole)


def _bytes(side: Side, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    sizes = np.array([numpy_dtype(word).itemsize for word in side.dtype.words], np.int64)
    found: npt.NDArray[np.int64] = side.elements[rows] * sizes[side.dtype.codes[rows]] if len(rows) else rows
    return found


def _engine(workers: int | None, device: PairDevice | None) -> Engine | None:
    """The one that was asked for."""
    if device is not None:
        return OnDevice(device)
    if workers is None:
        return None
    return Serial() if workers <= 1 else ProcessPool(workers)


def _on_disk(
    reference: Side,
    candidate: Side,
    left: npt.NDArray[np.int64],
    right: npt.NDArray[np.int64],
    tolerances: Tolerances,
    engine: Engine | None,
    told: Callable[[int], None] | None,
) -> Iterator[tuple[int, PairMeasure]]:
    sizes = reference.l2[left].tolist()
    tasks = [
        Task(ours, theirs, rtol=tolerances[0], atol=tolerances[1], size=size)
        for ours, theirs, size in zip(_spans(reference, left), _spans(candidate, right), sizes, strict=True)
    ]
    return (engine or choose(tasks)).run(tasks, told)


def _in_memory(
    reference: Side,
    candidate: Side,
    left: npt.NDArray[np.int64],
    right: npt.NDArray[np.int64],
    tolerances: Tolerances,
    told: Callable[[int], None] | None,
) -> Iterator[tuple[int, PairMeasure]]:
    done = 0
    for number, (ours, theirs) in enumerate(zip(left.tolist(), right.tolist(), strict=True)):
        arrays = reference.array(ours), candidate.array(theirs)
        size = float(reference.l2[ours])
        yield number, difference(*arrays, rtol=tolerances[0], atol=tolerances[1], size=size)
        done += sum(array.nbytes for array in arrays)
        if told is not None:
            told(done)


def _spans(side: Side, rows: npt.NDArray[np.int64]) -> Iterator[Span]:
    dtypes = side.dtype.at(rows)
    for row, dtype, (path, offset, nbytes) in zip(rows.tolist(), dtypes, side.locations(rows), strict=True):
        yield Span(path, dtype, side.shape(row), offset, nbytes)
