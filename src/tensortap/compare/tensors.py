"""Pairs of whole tensors, measured where they lie on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy.typing as npt

from tensortap.compare.align import Alignment
from tensortap.compare.side import Side
from tensortap.kernels.pairs import PairMeasure, difference

__all__ = ["measure_tensors"]


def measure_tensors(
    reference: Side,
    candidate: Side,
    alignment: Alignment,
    pairs: npt.NDArray[Any],
    workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[int, PairMeasure]]:
    """Measure pairs, the same two tensors only once however many records saw them."""
    known: dict[tuple[int, int], PairMeasure] = {}
    for pair in pairs.tolist():
        left, right = int(alignment.reference[pair]), int(alignment.candidate[pair])
        spot = int(reference.tensor_id[left]), int(candidate.tensor_id[right])
        if spot not in known:
            known[spot] = difference(_load(reference, left), _load(candidate, right))
        yield pair, known[spot]


def _load(side: Side, row: int) -> Any:
    record = side.run._index(int(side.rank[row])).records(side.row[row : row + 1])[0]
    return side.run.load(record)
