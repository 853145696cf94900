"""The evidence behind a tolerance: a pair's numbers, its sources, and how the pairs before it were judged."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.rules.summed_gradients import SummedGradients
from tensortap.compare.judge.structure import Structure

__all__ = ["Evidence", "JudgedPair"]


class Evidence:
    """All pairs, and what the judge knows about them so far. Columns are lists: rules read single elements."""

    def __init__(
        self, pairs: Pairs, structure: Structure, policy: Policy, reference_moved: Callable[[int, int], float]
    ) -> None:
        self.pairs = pairs
        self.structure = structure
        self.policy = policy
        self.reference_moved = reference_moved
        """How far apart two records of the reference are, relative to the first."""
        isolated = pairs.isolated
        self.error: list[float] = pairs.error.tolist()
        self.forced: list[bool] = [False] * len(self.error) if isolated is None else isolated.forced.tolist()
        self.propagated: list[float] = [
            0.0 if forced else error for forced, error in zip(self.forced, self.error, strict=True)
        ]
        """The error that records computed from a row inherit."""
        self.l2: list[float] = pairs.l2.tolist()
        self.base: list[float] = pairs.base.tolist()
        self.wrong = [False] * len(self.error)
        """Set by the judge."""
        self.summed = SummedGradients(structure, self.l2, pairs.std, self.base, pairs.elements, pairs.dimensions)

    def is_known(self, row: int) -> bool:
        return self.error[row] == self.error[row]

    def gradient_noise(self, row: int, sources: Sequence[int]) -> float:
        """Return the worst error of the gradients that moved a parameter. A parameter without a gradient that moves
        all the same follows others, as a moving average of a network does."""
        structure = self.structure
        own = [source for source in sources if structure.kind[source] == "param_grad"]
        rank, step, _ = structure.scope[row]
        at = rank, step if structure.number[row] else step - 1  # before a step: since the one before
        errors = [self.error[source] for source in own or self._gradients_in_step.get(at, [])]
        return max((error for error in errors if error < float("inf")), default=0.0)

    def step_size(self, row: int) -> float:
        """Return how far a parameter of the reference moved since it was last recorded, relative to its size."""
        structure = self.structure
        rank, step, _ = structure.scope[row]
        last = (step, 0) if structure.number[row] else (step - 1, 1)
        before = structure.state.get((rank, last[0], structure.module[row], "param", structure.path[row], last[1]))
        return 1.0 if before is None else self.reference_moved(before, row)

    def noise_of_unrecorded_parameters(self, row: int) -> float:
        """Return the error that gradient noise of earlier steps may have caused in unrecorded parameters."""
        rank, step, _ = self.structure.scope[row]
        module = self.structure.module[row]
        if (rank, step, module) in self.structure.parameters_of or not step:
            return 0.0
        known = None if module in self.structure.frozen else module  # a frozen one that moves averages others
        steps, worst = self._worst_gradients.get(known, ((), ()))
        before = bisect_left(steps, step)
        return worst[before - 1] ** 0.5 if before else 0.0

    @cached_property
    def _gradients_in_step(self) -> dict[tuple[int, int], list[int]]:
        """Rows of all parameter gradients, by rank and step."""
        found: dict[tuple[int, int], list[int]] = {}
        for (rank, step, _, _), rows in self.structure.gradients_of.items():
            found.setdefault((rank, step), []).extend(rows)
        return found

    @cached_property
    def _worst_gradients(self) -> dict[str | None, tuple[list[int], list[float]]]:
        """By module, and for all modules under None: the steps with parameter gradients, and the worst error up to
        each, on any rank. An optimizer may use the mean over all ranks."""
        found: dict[str | None, dict[int, float]] = {}
        for (_, step, module, _), rows in self.structure.gradients_of.items():
            errors = [min(1.0, self.error[row]) for row in rows if self.is_known(row)]
            for name in (module, None):
                steps = found.setdefault(name, {})
                steps[step] = max(steps.get(step, 0.0), *errors, 0.0)
        return {
            module: (sorted(steps), list(accumulate((steps[step] for step in sorted(steps)), max)))
            for module, steps in found.items()
        }


@dataclass(frozen=True)
class JudgedPair:
    """The pair whose tolerance is wanted."""

    evidence: Evidence
    row: int
    sources: Sequence[int]
    incoming: float
    """The worst error among its sources that are right."""

    @property
    def kind(self) -> str:
        return self.evidence.structure.kind[self.row]

    @property
    def policy(self) -> Policy:
        return self.evidence.policy

    @property
    def base(self) -> float:
        return self.evidence.base[self.row]

    @property
    def l2(self) -> float:
        return self.evidence.l2[self.row]

    @property
    def is_vector(self) -> bool:
        return bool(self.evidence.pairs.dimensions[self.row] <= 1)

    def sources_of(self, *kinds: str) -> list[int]:
        return [source for source in self.sources if self.evidence.structure.kind[source] in kinds]

    @property
    def right_activations(self) -> list[int]:
        return [source for source in self.sources_of("input", "output") if not self.evidence.wrong[source]]
