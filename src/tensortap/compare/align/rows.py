"""Whether two inputs have the same rows in another order: from their elements, or from the digests that runs keep."""

from __future__ import annotations

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.kernels.summary.row_order import digest_of_rows

__all__ = ["same_rows"]


def same_rows(reference: Side, candidate: Side, alignment: Alignment, pair: int) -> bool:
    """Whether a pair of unequal inputs of the model has the same rows. False if that is not known."""
    row, partner = int(alignment.reference[pair]), int(alignment.candidate[pair])
    if reference.shape(row) != candidate.shape(partner) or reference.dtype[row] != candidate.dtype[partner]:
        return False
    ours, theirs = _digest(reference, row), _digest(candidate, partner)
    return ours is not None and ours == theirs


def _digest(side: Side, row: int) -> int | None:
    if side.kept[row]:
        return digest_of_rows(side.array(row))
    key = side.key(row)
    facts = side.run.loop(int(side.rank[row])).value("rows", key.step)
    known = None if facts is None or key.module or key.call else facts.get(f"{key.micro}.{key.path}")
    try:
        return int(known, 16) if isinstance(known, str) else None
    except ValueError:  # written by something else
        return None
