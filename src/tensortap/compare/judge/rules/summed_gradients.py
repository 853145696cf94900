"""The sums behind parameter gradients, and how roughly they are rounded.

The gradient of a bias is a sum over all positions. Before a norm or a softmax it cancels out; the rounding of its
summands remains, in the coarser of both dtypes: under autocast a float32 gradient sums bfloat16 numbers. The gradient
at the module's output gives the size of the summands. If it was not recorded, the gradient of the module's weight gives
an estimate: it sums the same numbers, each times an input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.pairs import Floats
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.structure import Structure

__all__ = ["SummedGradients"]


class SummedGradients:
    """Sizes and errors of the gradients that a module's bias sums. All columns are the reference's, by pair."""

    def __init__(
        self,
        structure: Structure,
        l2: Sequence[float],
        std: Floats,
        base: Sequence[float],
        elements: npt.NDArray[np.int64],
        dimensions: npt.NDArray[np.int8],
    ) -> None:
        self._structure = structure
        self._l2 = l2
        self._std = std
        self._base = base
        self._elements = elements
        self._dimensions = dimensions
        self._worst_right: dict[tuple[int, int, int], float] = {}
        self._step_gradients: dict[tuple[int, int], dict[str, list[int]]] = {}

    def add_right_gradient(self, row: int, error: float, is_of_loss: bool = False) -> None:
        """Note the error of a weight's gradient that is right: gradients of earlier modules may be as far off.

        is_of_loss: the loss made the error, so that it is not one of a bias alone.
        """
        if self._dimensions[row] > 1 or is_of_loss:
            scope = self._structure.scope[row]
            self._worst_right[scope] = max(self._worst_right.get(scope, 0.0), error)

    def worst_right(self, row: int) -> float:
        """Return the worst error that was noted so far in the scope of a row."""
        return self._worst_right.get(self._structure.scope[row], 0.0)

    def rounding(self, row: int, sources: Sequence[int], error: Sequence[float], wrong: Sequence[int]) -> float:
        """Return the absolute error that rounding may make in a bias's gradient; 0 if its summands are unknown.

        `error` and `wrong` are what is known about all pairs so far.
        """
        summed = self._gradients(sources)
        if not summed:
            return self.unrecorded_error(row, sources) * self.size(row, sources)
        incoming = max((error[s] for s in summed if not wrong[s] and error[s] < float("inf")), default=0.0)
        return max(self._coarsest(row, summed), Policy.passed_on(incoming)) * self.size(row, sources)

    def rounding_over_step(self, row: int, error: Sequence[float]) -> float:
        """Return the absolute error that rounding may make in a bias's gradient over a step whose micro batches are not
        comparable: its summands are as far off as the gradients of the module's matrices."""
        matrices = [each for each in self._own_gradients(row) if self._dimensions[each] > 1]
        incoming = max((error[each] for each in matrices if error[each] < float("inf")), default=0.0)
        return max(self._base[row], Policy.passed_on(incoming)) * self._estimate_size(row)

    def size(self, row: int, sources: Sequence[int]) -> float:
        """Return the norm of all numbers that a bias's gradient sums."""
        summed = self._gradients(sources)
        if not summed:
            return self._estimate_size(row)
        return float(np.sqrt(sum(self._l2[source] ** 2 for source in summed)))

    def unrecorded_error(self, row: int, sources: Sequence[int]) -> float:
        """Return the relative error of gradients that a module was given and that were not recorded; 0 if they were.
        They have the dtypes that the module works with, and are as far off as the gradients of weights before."""
        if self._gradients(sources):
            return 0.0
        return max(self._coarsest(row, self._flowing(row)), Policy.passed_on(self.worst_right(row)))

    def _gradients(self, sources: Sequence[int]) -> list[int]:
        return [source for source in sources if self._structure.kind[source] == "grad_output"]

    def _coarsest(self, row: int, others: Sequence[int]) -> float:
        """Return the relative rounding of a sum in the coarsest dtype among its own and those of other rows."""
        longest = Policy.lengthening("param_grad") * max((self._base[other] for other in others), default=0.0)
        return max(self._base[row], longest)

    def _flowing(self, row: int) -> list[int]:
        return [r for call in self._structure.users_of_own(row) for r in call.of("input", "output")]

    def _estimate_size(self, row: int) -> float:
        """Estimate the size of the summands from a weight's gradient, a sum of products with inputs over all positions.
        For independent numbers, it grows with the square root of their count."""
        structure, own = self._structure, self._own_gradients(row)
        weights = [r for r in own if self._dimensions[r] > 1]
        if not weights:  # a norm: its scale is multiplied with values of size one
            return max((self._l2[r] for r in own if r != row), default=0.0)
        inputs = [r for call in structure.users_of_own(row) for r in call.of("input")]
        spread = max((float(self._std[r]) for r in inputs if self._base[r] and self._std[r] > 0), default=1.0)
        weight = max(weights, key=lambda r: self._l2[r])
        inputs_of_one = max(1.0, float(self._elements[weight]) / max(1, int(self._elements[row])))
        return float(self._l2[weight] / (np.sqrt(inputs_of_one) * spread))

    def _own_gradients(self, row: int) -> Sequence[int]:
        """Return the gradients of the parameters of a row's module: from backward, or those that the optimizer got."""
        structure = self._structure
        scope, module = structure.scope[row], structure.module[row]
        if structure.kind[row] != "step_grad":
            return structure.own_gradients.get((scope, module), [])
        at = scope[:2]
        if at not in self._step_gradients:
            by_module: dict[str, list[int]] = {}
            for (_, _, owner, _), rows in structure.step_gradients_of.items_in(*at):
                by_module.setdefault(owner, []).extend(rows)
            self._step_gradients[at] = by_module
        return self._step_gradients[at].get(module, [])
