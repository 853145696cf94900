"""Padding that sees nothing, because code makes its attention causal inside, or gives it a window.

A mask of padding alone does not show that, but the first values that differ in a forward pass do: they differ at
padding alone, and one side has the same numbers wherever they do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.measure.hidden import AGREES, see_nothing
from tensortap.compare.measure.mask_pairs import equal_flags
from tensortap.compare.measure.masks import MaskDifference, padding_mask
from tensortap.compare.measure.measures import Measures

__all__ = ["CausalPadding"]

_Scope = tuple[int, int, int]
"""Rank, step and micro step."""
_TRIES = 16
"""Pairs that are as close as rounding may be and that are looked at all the same, in each forward pass."""


class CausalPadding:
    """Finds the forward passes with such padding, and keeps the masks of it."""

    def __init__(self, reference: Side, candidate: Side, alignment: Alignment, measures: Measures) -> None:
        self._reference, self._candidate = reference, candidate
        self._alignment, self._measures = alignment, measures
        self._decided: set[_Scope] = set()
        self._tried: dict[_Scope, int] = {}
        """Number of pairs that were looked at and are as close as rounding may be."""

    def find(self, pairs: npt.NDArray[np.int64]) -> None:
        """Look at pairs that were measured, in execution order."""
        left, right, rows = self._reference, self._candidate, self._alignment.reference
        masks = self._masks()
        if not masks:
            return
        for pair in pairs[left.phase.among(("forward",))[rows[pairs]]].tolist():
            row, partner, scope = int(rows[pair]), int(self._alignment.candidate[pair]), self._scope(pair)
            if scope not in masks or scope in self._decided or pair in self._measures.masks:
                continue
            off = float(self._measures.rel_l2[pair])
            if off <= Policy.base(left.dtype[row], right.dtype[partner]):
                continue
            if off > AGREES:
                self._decided.add(scope)
            elif (tried := self._tried.get(scope, 0)) < _TRIES:  # it may be rounding, or few positions of many
                self._tried[scope] = tried + 1
            else:
                continue
            arrays = left.array(row), right.array(partner)
            known = [mask.positions for mask in masks[scope].values() if mask.positions is not None]
            if any(see_nothing(positions, *arrays) for positions in known):
                self._decided.add(scope)
                self._measures.masks |= masks[scope]

    def _masks(self) -> dict[_Scope, dict[int, MaskDifference]]:
        """Return masks of padding, of forward passes that are not decided."""
        left, measures = self._reference, self._measures
        known = {self._scope(pair) for pair, mask in measures.masks.items() if mask.frees_positions}
        found: dict[_Scope, dict[int, MaskDifference]] = {}
        for pair in equal_flags(left, self._candidate, self._alignment, measures.equal):
            scope, row = self._scope(pair), int(self._alignment.reference[pair])
            if scope in known | self._decided or not left.kept[row]:
                continue
            if (mask := padding_mask(left.array(row))) is not None:
                found.setdefault(scope, {})[pair] = mask
        return found

    def _scope(self, pair: int) -> _Scope:
        side, row = self._reference, int(self._alignment.reference[pair])
        return int(side.rank[row]), int(side.step[row]), int(side.micro[row])
