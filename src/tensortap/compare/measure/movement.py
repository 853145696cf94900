"""How far records of a run are apart, such as a parameter before and after a step."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Side

__all__ = ["ReferenceMovement"]

Ints = npt.NDArray[np.int64]
_READ_TOGETHER, _BLOCKS_KEPT = 128, 4
"""Records whose sketches are read together if few are asked for, and how many such blocks are kept."""
_AT_ONCE = 1024
"""Records whose sketches are in memory at once, if many are asked for."""


class ReferenceMovement:
    """Returns for two columns of pairs how far apart the reference's records are, relative to the first ones.

    `rows` are the reference's rows of all pairs. Sketches give the distance; it is 1 where there are none.
    """

    def __init__(self, side: Side, rows: Ints) -> None:
        self._side, self._rows = side, rows
        self._blocks: OrderedDict[int, dict[int, npt.NDArray[np.float32]]] = OrderedDict()

    def __call__(self, before: Ints, after: Ints) -> npt.NDArray[np.float64]:
        left, right = self._rows[before], self._rows[after]
        norms = np.asarray(self._side.l2[left], np.float64)
        found = np.ones(len(left))
        usable = np.flatnonzero(self._side.has_sketch[left] & self._side.has_sketch[right] & (norms != 0))
        for begin in range(0, len(usable), _AT_ONCE):
            part = usable[begin : begin + _AT_ONCE]
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                apart = self._sketches(left[part]).astype(np.float64) - self._sketches(right[part])
                # One by one: a sum over an axis adds in another order than one over a vector.
                moved = np.sqrt(np.array([each.dot(each) for each in apart], np.float64)) / norms[part]
            found[part] = np.where(np.isfinite(moved), moved, 1.0)  # a sketch that overflowed is useless
        return found

    def _sketches(self, rows: Ints) -> npt.NDArray[np.float32]:
        if len(rows) > _READ_TOGETHER:
            return self._side.sketches_at(rows)
        return np.array([self._near_sketch(row) for row in rows.tolist()], np.float32)

    def _near_sketch(self, row: int) -> npt.NDArray[np.float32]:
        """Return the sketch of a record. Parameters are recorded together, so those near to it are read, too."""
        block = row // _READ_TOGETHER
        if block not in self._blocks:
            near = np.arange(block * _READ_TOGETHER, min((block + 1) * _READ_TOGETHER, len(self._side)))
            near = near[self._side.has_sketch[near]]
            self._blocks[block] = dict(zip(near.tolist(), self._side.sketches_at(near), strict=True))
        self._blocks.move_to_end(block)
        while len(self._blocks) > _BLOCKS_KEPT:
            self._blocks.popitem(last=False)
        return self._blocks[block][row]
