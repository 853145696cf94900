"""Values that consist of rows of another value, such as the states of the last tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.measure.hidden import HiddenPositions

__all__ = ["other_rows_between", "selected_rows"]

Array = npt.NDArray[Any]


def selected_rows(made: Array, source: Array) -> list[set[int]] | None:
    """Return for each row of a value the rows of another one that are equal to it; None if one has no equal.

    >>> rows = np.arange(6.0).reshape(3, 2)
    >>> selected_rows(rows[1:], rows)
    [{1}, {2}]
    """
    if made.ndim < 2 or source.ndim < 2 or made.shape[-1] != source.shape[-1] or made.dtype != source.dtype:
        return None
    places: dict[bytes, set[int]] = {}
    for place, row in enumerate(source.reshape(-1, source.shape[-1])):
        places.setdefault(row.tobytes(), set()).add(place)
    found = [places.get(row.tobytes()) for row in made.reshape(-1, made.shape[-1])]
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) else None


def other_rows_between(
    reference: Side, candidate: Side, alignment: Alignment, hidden_of: Callable[[int], HiddenPositions | None]
) -> Callable[[int, Iterable[int]], bool]:
    """Return a function of a pair and of pairs that it may be made from: whether each side consists of rows of one of
    these, and of others than the other side. Rows at hidden positions do not count: tokens there may choose other
    experts. Unknown if tensors were not kept, or if the hidden positions are not known.

    hidden_of: returns the positions that masks hide in the forward pass of a pair.
    """

    def arrays(pair: int) -> tuple[Array, Array] | None:
        left, right = int(alignment.reference[pair]), int(alignment.candidate[pair])
        kept = reference.kept[left] and candidate.kept[right]
        return (reference.array(left), candidate.array(right)) if kept else None

    def are_other(pair: int, sources: Iterable[int]) -> bool:
        made, hidden = arrays(pair), hidden_of(pair)
        if made is None or hidden is None:
            return False
        for source in sources:
            given = arrays(source)
            where = None if given is None else hidden.rows(given[0].shape)
            if given is None or where is None or given[0].shape != given[1].shape:
                continue
            ours, theirs = (selected_rows(*each) for each in zip(made, given, strict=True))
            if ours is not None and theirs is not None:
                return not _are_the_same(ours, theirs, where)
        return False

    return are_other


def _are_the_same(ours: Sequence[set[int]], theirs: Sequence[set[int]], hidden: set[int]) -> bool:
    """Whether two selections have the same rows, each as often, in any order. Rows that are equal on a side are one."""
    first: dict[int, int] = {}
    for each in (*ours, *theirs):
        ids = {first.get(row, row) for row in each - hidden}
        first |= {row: min(ids) for row in [*(each - hidden), *(row for row, known in first.items() if known in ids)]}
    counts = (Counter(first[min(each - hidden)] for each in side if each - hidden) for side in (ours, theirs))
    return next(counts) == next(counts)
