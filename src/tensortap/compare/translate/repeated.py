"""Values that one side repeats along an axis and the other holds once: position ids of a batch, a mask of all heads.

Frameworks broadcast such a value where it is used, so a shape that differs only in this is right. Such pairs are
measured at their common shape. A gradient is the sum over all repetitions, so the larger one is summed.

Pairs of another scale, and of real and complex numbers, are measured from both arrays, too, and not by a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.measure.measures import Measures
from tensortap.compare.measure.tensors import Tolerances
from tensortap.core.records import STATE_KINDS
from tensortap.kernels import difference
from tensortap.kernels.pairs.reference import PairMeasure
from tensortap.mapping.layouts import Shape, common_shape, same_elements

__all__ = ["REPEATED", "half_complex_pairs", "measure_repeated", "repeated_pairs"]

Array = npt.NDArray[Any]
REPEATED = "its shape alone differs, and its elements were not kept"


def repeated_pairs(reference: Side, candidate: Side, alignment: Alignment, measures: Measures) -> list[int]:
    """Return pairs whose shapes differ only in axes of size one, and no longer count them as reshaped."""
    found = []
    for pair in np.flatnonzero(measures.reshaped).tolist():
        left, right = int(alignment.reference[pair]), int(alignment.candidate[pair])
        if reference.kind[left] in STATE_KINDS or candidate.relaid[right]:
            continue
        if common_shape(reference.shape(left), candidate.shape(right)) is not None:
            found.append(pair)
    measures.reshaped[found] = False
    return found


def half_complex_pairs(reference: Side, candidate: Side, alignment: Alignment, measures: Measures) -> list[int]:
    """Return pairs of real and complex numbers, which no kernel takes. A real number is one without imaginary part."""
    ours, theirs = (
        np.array(["complex" in word for word in side.dtype.words], bool)[side.dtype.codes[rows]]
        for side, rows in ((reference, alignment.reference), (candidate, alignment.candidate))
    )
    found: list[int] = np.flatnonzero((ours != theirs) & ~measures.reshaped).tolist()
    return found


def measure_repeated(
    reference: Side, candidate: Side, alignment: Alignment, pairs: list[int], tolerances: Tolerances
) -> Iterator[tuple[int, PairMeasure]]:
    """Yield (pair, measure) of pairs whose elements both sides stored. The same two tensors are measured once."""
    known: dict[tuple[int, int], PairMeasure] = {}
    for pair in pairs:
        left, right = int(alignment.reference[pair]), int(alignment.candidate[pair])
        if not (reference.kept[left] and candidate.kept[right]):
            continue
        tensors = int(reference.tensor_id[left]), int(candidate.tensor_id[right])
        if tensors not in known:
            backward = reference.kind[left].startswith("grad_")
            ours, theirs = _fitted(reference.array(left), candidate.array(right), backward)
            if ours.dtype.kind == "c" or theirs.dtype.kind == "c":
                ours, theirs = (array.astype(np.complex128) for array in (ours, theirs))
            size = float(np.linalg.norm(ours.astype(np.result_type(ours.dtype, np.float64)).reshape(-1)))
            known[tensors] = difference(ours, theirs, rtol=tolerances[0], atol=tolerances[1], size=size)
        yield pair, known[tensors]


def _fitted(ours: Array, theirs: Array, backward: bool) -> tuple[Array, Array]:
    """Return both at one shape: forward at the larger one, backward at the smaller one."""
    common = common_shape(ours.shape, theirs.shape)
    assert common is not None, "only pairs that have one are measured"
    if same_elements(ours.shape, theirs.shape):
        return ours.reshape(common), theirs.reshape(common)
    if not backward:
        left, right = (np.ascontiguousarray(np.broadcast_to(array, common)) for array in (ours, theirs))
        return left, right
    ours, theirs = (array.reshape((1,) * (len(common) - array.ndim) + array.shape) for array in (ours, theirs))
    smaller: Shape = tuple(np.minimum(ours.shape, theirs.shape).tolist())
    return _summed(ours, smaller), _summed(theirs, smaller)


def _summed(array: Array, shape: Shape) -> Array:
    axes = tuple(axis for axis, (size, wanted) in enumerate(zip(array.shape, shape, strict=True)) if size != wanted)
    if not axes:
        return np.ascontiguousarray(array)
    return np.ascontiguousarray(array.astype(np.float64).sum(axes, keepdims=True).astype(array.dtype))
