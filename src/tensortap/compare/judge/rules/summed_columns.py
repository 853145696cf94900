"""Gradients of parameters whose summands were not recorded, in columns; see `summed_gradients` for one pair."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tensortap.compare.align.side import Ints
from tensortap.compare.judge.pairs import Floats
from tensortap.compare.judge.row_lists import largest
from tensortap.compare.judge.rules.columns import PairColumns
from tensortap.compare.judge.rules.rounding import Policy

__all__ = ["ListedRows", "UnrecordedTerms"]

ListedRows = tuple[Ints, Ints]
"""Rows of many pairs, one pair after the other, and how many each has."""


@dataclass
class UnrecordedTerms(PairColumns):
    """Gradients of parameters, without any at the outputs of their modules among their sources.

    own: all gradients of their modules' parameters, whose numbers must be known. inputs, outputs: those of the calls
    that used the parameters.
    """

    own: ListedRows
    inputs: ListedRows
    outputs: ListedRows
    worst_right: Floats
    """The worst error of the right gradients of matrices before each pair, of its own scope."""

    @cached_property
    def terms(self) -> Floats:
        pairs = self.evidence.pairs
        rows, counts = self.own
        owners = np.repeat(np.arange(len(self.rows)), counts)
        is_weight = pairs.dimensions[rows] > 1
        weights, their_counts = rows[is_weight], np.bincount(owners[is_weight], minlength=len(self.rows))
        sizes = pairs.l2[weights]
        size = largest(sizes, their_counts, -np.inf)
        begins = np.cumsum(their_counts) - their_counts
        first = np.flatnonzero(sizes == size[owners[is_weight]])  # the first of equally large ones
        weight = self.rows
        if len(first):
            weight = weights[first[np.minimum(np.searchsorted(first, begins), len(first) - 1)]]
        of_one = np.maximum(1.0, pairs.elements[weight] / np.maximum(1, pairs.elements[self.rows]))
        others = np.where(rows == self.rows[owners], 0.0, pairs.l2[rows])
        with np.errstate(all="ignore"):
            estimated = size / (np.sqrt(of_one) * self._spread)
        # A norm has no matrix: its scale is multiplied with values of size one.
        return np.where(their_counts > 0, estimated, largest(others, counts))

    @property
    def _spread(self) -> Floats:
        """The largest standard deviation of the inputs; 1 if it is not known."""
        pairs = self.evidence.pairs
        rows, counts = self.inputs
        spread = pairs.std[rows]
        found = largest(np.where((pairs.base[rows] != 0) & (spread > 0), spread, 0.0), counts)
        return np.where(found > 0, found, 1.0)

    @cached_property
    def unrecorded_error(self) -> Floats:
        base = self.evidence.pairs.base
        flowing = np.maximum(*(largest(base[rows], counts) for rows, counts in (self.inputs, self.outputs)))
        coarsest = np.maximum(self.base, Policy.lengthening("param_grad") * flowing)
        return np.maximum(coarsest, Policy.passed_on(1.0) * self.worst_right)

    @property
    def rounding_of_terms(self) -> Floats:
        return self.unrecorded_error * self.terms
