"""Gradients of parameters: what they sum, and how roughly.

The gradient of a bias is a sum over all positions. Before a norm or a softmax it cancels out, and what is left is the
rounding of what it sums, in the coarser of both dtypes: under autocast a float32 gradient sums bfloat16 numbers. How
large these are is known from the gradient at the module's output. Where that was not recorded, it is estimated from the
gradient of the module's weight, which sums the same numbers, each times an input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.structure import Structure
from tensortap.compare.judge.tolerance import Policy

__all__ = ["SummedGradients"]

Floats = npt.NDArray[np.float64]


class SummedGradients:
    """What is known of the gradients that a module's bias sums. All columns are the reference's, by pair."""

    def __init__(
        self,
        structure: Structure,
        l2: Sequence[float],
        std: Floats,
        base: Sequence[float],
        elements: npt.NDArray[np.int64],
        dimensions: npt.NDArray[np.int64],
    ) -> None:
        self._structure = structure
        self._l2 = l2
        self._std = std
        self._base = base
        self._elements = elements
        self._dimensions = dimensions

        self._arrived: dict[tuple[int, int, int], float] = {}

    def arrived(self, row: int, error: float) -> None:
        """A gradient of a weight is right though it is off by so much: what flows on to earlier modules may be, too."""
        if self._dimensions[row] > 1:
            scope = self._structure.scope[row]
            self._arrived[scope] = max(self._arrived.get(scope, 0.0), error)

    def rounding(self, row: int, sources: Sequence[int], error: Sequence[float], wrong: Sequence[bool]) -> float:
        """The absolute error that rounding may make in the sum of a bias's gradient; 0 if its summands are unknown.

        `sources` are what the gradient was made from, `error` and `wrong` what is known of all pairs so far.
        """
        summed = self._gradients(sources)
        if not summed:
            return self.unseen(row, sources) * self._estimated(row)
        size = float(np.sqrt(sum(self._l2[source] ** 2 for source in summed)))
        came_in = max((error[s] for s in summed if not wrong[s] and error[s] < float("inf")), default=0.0)
        return max(self._coarsest(row, summed), Policy.passed_on(came_in)) * size

    def unseen(self, row: int, sources: Sequence[int]) -> float:
        """The relative error of gradients that a module was given and that were not recorded; 0 if they were. They are
        of the dtypes that the module works with, and as far off as the gradients of weights were before."""
        if self._gradients(sources):
            return 0.0
        came_in = self._arrived.get(self._structure.scope[row], 0.0)
        return max(self._coarsest(row, self._flowing(row)), Policy.passed_on(came_in))

    def _gradients(self, sources: Sequence[int]) -> list[int]:
        return [source for source in sources if self._structure.kind[source] == "grad_output"]

    def _coarsest(self, row: int, others: Sequence[int]) -> float:
        """The relative rounding of a sum in the coarsest dtype among its own and those of others."""
        longest = Policy.lengthening("param_grad") * max((self._base[other] for other in others), default=0.0)
        return max(self._base[row], longest)

    def _flowing(self, row: int) -> list[int]:
        return [r for call in self._structure.users_of_own(row) for r in call.of("input", "output")]

    def _estimated(self, row: int) -> float:
        """The size of the summands, from a weight's gradient. That is a sum of as many products with inputs as there
        are positions: of numbers that have nothing to do with each other, it is as large as the square root says."""
        structure = self._structure
        own = structure.own_gradients.get((structure.scope[row], structure.module[row]), ())
        weights = [r for r in own if self._dimensions[r] > 1]
        if not weights:  # a norm: its scale is multiplied with values of size one
            return max((self._l2[r] for r in own if r != row), default=0.0)
        inputs = [r for call in structure.users_of_own(row) for r in call.of("input")]
        spread = max((float(self._std[r]) for r in inputs if self._base[r] and self._std[r] > 0), default=1.0)
        weight = max(weights, key=lambda r: self._l2[r])
        inputs_of_one = max(1.0, float(self._elements[weight]) / max(1, int(self._elements[row])))
        return float(self._l2[weight] / (np.sqrt(inputs_of_one) * spread))
