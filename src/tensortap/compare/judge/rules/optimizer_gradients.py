"""The gradients that an optimizer uses: their noise, and the norm of all of them by which they are clipped.

Every parameter asks about all gradients of its step, or of all steps so far. What they have in common is worked out
once. How a gradient was judged counts, so an answer is kept only if all its gradients were judged before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tensortap.compare.judge.rules.evidence import Evidence

__all__ = ["SAME_CLIPPING", "GradientsSoFar", "OptimizerGradients"]

SAME_CLIPPING = 1e-2
"""Share of a change of clipping that the norms of all gradients need not explain."""
_UNEVEN = 0.7
"""Mean magnitude over the root mean square: 0.8 of normal numbers, 0.69 if a quarter of them is nearly zero, as the
gradients of an expert's scores that no token chose."""

_Parameter = tuple[int, str, str]
"""Rank, module and path."""


class _StepNorms(NamedTuple):
    """The norm of all gradients of a step on each side; None if it is not known, because some were accumulated."""

    reference: float | None
    candidate: float | None


@dataclass
class GradientsSoFar:
    """The differing gradients of a parameter up to a step. An optimizer may have them in its moments."""

    evidence: Evidence
    rows: list[int]
    """All gradients of the parameter, by step."""
    steps: list[int]
    _read: int = 0
    _share: float | None = 0.0
    _checked: int = 0
    _is_uneven: bool = field(default=False)

    def worst_share(self, step: int) -> float | None:
        """Return the worst error of an optimizer's step that these gradients explain; None if one is not known.

        Steps must be asked for in order; so must those of `are_uneven`.
        """
        while self._read < len(self.rows) and self.steps[self._read] <= step:
            row = self.rows[self._read]
            self._read += 1
            if self.evidence.pairs.equal[row]:
                continue
            share = self.evidence.pairs.step_noise_of(row) if self._share is not None else None
            self._share = None if share is None or self._share is None else max(self._share, share)
        return self._share

    def worst_error(self, step: int) -> float:
        """Return the worst error of these gradients up to a step."""
        errors = [self.evidence.error[row] for row, at in zip(self.rows, self.steps, strict=True) if at <= step]
        return max((error for error in errors if error < float("inf")), default=0.0)

    def are_uneven(self, step: int) -> bool:
        """Whether many elements of one of them are much smaller than the others, beside those that are zero."""
        while not self._is_uneven and self._checked < len(self.rows) and self.steps[self._checked] <= step:
            row = self.rows[self._checked]
            self._checked += 1
            self._is_uneven = not self.evidence.pairs.equal[row] and self._uneven(row)
        return self._is_uneven

    def _uneven(self, row: int) -> bool:
        pairs = self.evidence.pairs
        others = int(pairs.elements[row] - pairs.zeros[row])
        return others > 0 and float(pairs.l1[row]) < _UNEVEN * others**0.5 * self.evidence.l2[row]


class OptimizerGradients:
    """All gradients of parameters, by step and by parameter."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._structure = evidence.structure
        self._norm_errors: dict[tuple[int, int], float] = {}
        self._worst_norm_errors: dict[tuple[int, int], float] = {}
        self._settled: dict[int, tuple[int, float]] = {}
        """By rank: number of steps whose gradients are all judged, and the worst error of their norms."""
        self._worst_errors: dict[tuple[int, int], float] = {}
        self._norms: dict[tuple[int, int], _StepNorms] = {}
        self._so_far: dict[_Parameter, tuple[int, GradientsSoFar]] = {}

    def noise(self, row: int, sources: Sequence[int]) -> float:
        """Return the worst error of the gradients that moved a parameter. A parameter without a gradient that moves
        all the same follows others, as a moving average of a network does."""
        structure = self._structure
        if own := [source for source in sources if structure.kind[source] in ("param_grad", "step_grad")]:
            return self._worst_of(own)
        rank, step, _ = structure.scope[row]
        return self.noise_of_step((rank, step if structure.number[row] else step - 1))  # before a step: since the last

    def noise_of_step(self, at: tuple[int, int]) -> float:
        """Return the worst error of all gradients of a step."""
        if at not in self._worst_errors:
            self._worst_errors[at] = self._worst_of(self._in_step.get(at, []))
        return self._worst_errors[at]

    def _worst_of(self, rows: Sequence[int]) -> float:
        errors = [self._evidence.error[row] for row in rows]
        return max((error for error in errors if error < float("inf")), default=0.0)

    def so_far(self, row: int) -> GradientsSoFar:
        """Return the gradients of a parameter up to its step."""
        rank, step, _ = self._structure.scope[row]
        parameter = rank, self._structure.module[row], self._structure.path[row]
        asked, found = self._so_far.get(parameter, (0, None))
        if found is None or step < asked:
            scope = self._structure.scope
            rows = sorted(self._by_parameter.get(parameter, ()), key=lambda each: scope[each][1])
            found = GradientsSoFar(self._evidence, rows, [scope[each][1] for each in rows])
        self._so_far[parameter] = step, found
        return found

    def error_of_norm(self, row: int) -> float:
        """Return the error that right gradients of a step may cause in the norm of all of them."""
        rank, step, _ = self._structure.scope[row]
        return self.error_of_norm_at((rank, step), row)

    def error_of_norm_at(self, at: tuple[int, int], judged: int) -> float:
        """Return `error_of_norm` of a step, as known when all rows before one are judged."""
        if at in self._norm_errors:
            return self._norm_errors[at]
        evidence, rows = self._evidence, self._in_step.get(at, [])
        distance = evidence.distance
        known = [each for each in rows if not evidence.wrong[each] and distance[each] < float("inf")]
        size = sum(evidence.l2[each] ** 2 for each in known)
        found = float((sum(distance[each] ** 2 for each in known) / size) ** 0.5) if size > 0 else 0.0
        if max(rows, default=-1) < judged:
            self._norm_errors[at] = found
        return found

    def error_of_norms(self, row: int) -> float:
        """Return the worst error of the norm of all gradients, over the steps that have moved a parameter."""
        rank, last, _ = self._structure.scope[row]
        at = rank, last - (not self._structure.number[row])  # before a step
        return self.errors_of_norms([at], judged=row)[at]

    def errors_of_norms(self, wanted: Sequence[tuple[int, int]], judged: int) -> dict[tuple[int, int], float]:
        """Return by rank and step the worst error of the norm of all gradients, over the steps up to that one."""
        found = {at: self._worst_norm_errors[at] for at in wanted if at in self._worst_norm_errors}
        for rank in {rank for rank, _ in wanted}:
            open_steps = sorted(step for of, step in wanted if of == rank and (of, step) not in found)
            steps = self._steps_of.get(rank, [])
            place, worst = self._settled.get(rank, (0, 0.0))
            if place and open_steps and open_steps[0] < steps[place - 1]:
                place, worst = 0, 0.0
            are_judged = True
            for last in open_steps:
                while place < len(steps) and steps[place] <= last:
                    at = rank, steps[place]
                    worst = max(worst, self.error_of_norm_at(at, judged))
                    are_judged = are_judged and at in self._norm_errors
                    place += 1
                    if are_judged:
                        self._settled[rank] = place, worst
                found[rank, last] = worst
                if are_judged:
                    self._worst_norm_errors[rank, last] = worst
        return found

    @cached_property
    def _steps_of(self) -> dict[int, list[int]]:
        """The steps that have gradients of parameters, in order, by rank."""
        found: dict[int, list[int]] = {}
        for rank, step in sorted(self._in_step):
            found.setdefault(rank, []).append(step)
        return found

    def error_of_clipping(self, row: int) -> float | None:
        """Return the error of a gradient that both sides clipped to the same norm of all gradients.

        Norms show it: each side's factor of this gradient, times its norm of all gradients before, is the norm that it
        clips to. None if these differ, or if a gradient was accumulated, so that its norm before is not known.
        """
        rank, step, _ = self._structure.scope[row]
        evidence, own = self._evidence, self._structure.sources(row)
        if len(own) != 1:
            return None
        clipped = []
        norms = self.norms_of((rank, step))
        for l2, before in ((evidence.l2, norms.reference), (evidence.pairs.candidate_l2, norms.candidate)):
            if before is None or not (l2[own[0]] > 0 and 0 < before < float("inf")):
                return None
            clipped.append((float(l2[row] / l2[own[0]]), before))
        (ours, our_norm), (theirs, their_norm) = clipped
        explained = our_norm / their_norm
        allowed = evidence.base[row] + SAME_CLIPPING * abs(explained - 1)
        if not ours > 0 or abs(theirs / ours / explained - 1) > allowed:
            return None
        return float(abs(explained - 1) + explained * evidence.error[own[0]])

    def norms_of(self, at: tuple[int, int]) -> _StepNorms:
        """Return the norms of all gradients of a step."""
        if at not in self._norms:
            every, structure = self._in_step.get(at, []), self._structure
            if len({(structure.module[each], structure.path[each]) for each in every}) < len(every):
                self._norms[at] = _StepNorms(None, None)
            else:
                sides = (self._evidence.l2, self._evidence.pairs.candidate_l2)
                self._norms[at] = _StepNorms(
                    *(float(sum(float(l2[each]) ** 2 for each in every)) ** 0.5 for l2 in sides)
                )
        return self._norms[at]

    @cached_property
    def _in_step(self) -> dict[tuple[int, int], list[int]]:
        """Rows of all parameter gradients, by rank and step."""
        found: dict[tuple[int, int], list[int]] = {}
        for (rank, step, _, _), rows in self._structure.gradients_of.items():
            found.setdefault((rank, step), []).extend(rows)
        return found

    @cached_property
    def _by_parameter(self) -> dict[_Parameter, list[int]]:
        """Rows of all gradients of a parameter, by rank, module and path."""
        found: dict[_Parameter, list[int]] = {}
        for known in (self._structure.gradients_of, self._structure.step_gradients_of):
            for (rank, _, module, path), rows in known.items():
                found.setdefault((rank, module, path), []).extend(rows)
        return found
