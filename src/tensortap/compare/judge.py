"""Right or wrong, and whose fault: each pair is judged against what its records were made from.

A record that is off by more than its tolerance is wrong. If what it was made from was right, the wrong was born there;
if not, it was handed on. The tolerance follows the error that came in, so that noise which grows along a deep run
raises no alarm, while a small mistake in a run that was exact so far does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from tensortap.compare.structure import Structure
from tensortap.compare.tolerance import Policy

__all__ = ["Judgement", "Pairs", "judge"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pairs:
    """The numbers of all pairs that judging needs, in execution order."""

    rel_l2: Floats
    """0 where equal, NaN where not known."""
    l2: Floats
    """Of the reference."""
    elements: npt.NDArray[np.int64]
    equal: npt.NDArray[np.bool_]
    nonfinite: npt.NDArray[np.bool_]
    """One side has NaN or Inf where the other has not."""
    reshaped: npt.NDArray[np.bool_]
    dimensions: npt.NDArray[np.int64]
    base: Floats
    """Tolerance if all it was made from is right."""

    def first(self, count: int) -> Pairs:
        return Pairs(*(getattr(self, column.name)[:count] for column in fields(self)))


@dataclass(frozen=True)
class Judgement:
    """For every pair: status, tolerance and rule; and for the wrong ones whether they were born there."""

    status: list[str]
    tolerance: Floats
    rule: list[str]
    born: list[int]
    """Rows, in execution order."""
    sources_error: dict[int, float]
    """For each born row, the worst error among what it was made from; NaN if nothing of that was recorded."""


class _Judge:
    def __init__(self, pairs: Pairs, structure: Structure, policy: Policy, moved: Callable[[int, int], float]) -> None:
        self.pairs = pairs
        self.moved = moved
        self.structure = structure
        self.policy = policy
        count = len(pairs.rel_l2)
        self.status = np.where(pairs.equal, "equal", "unjudged").astype(object)
        self.tolerance = np.where(pairs.equal, pairs.base, 0.0)
        self.rule: list[str] = ["bitwise"] * count
        self.wrong = np.zeros(count, bool)
        self.born: list[int] = []
        self.sources_error: dict[int, float] = {}
        self._unrecorded: dict[tuple[int, str], float] = {}

    def run(self) -> Judgement:
        # What is equal needs no judging and, as a source, adds no error: only the others are walked through.
        for row in np.flatnonzero(~self.pairs.equal).tolist():
            self._judge(row)
        return Judgement(self.status.tolist(), self.tolerance, self.rule, self.born, self.sources_error)

    def _judge(self, row: int) -> None:
        pairs, error = self.pairs, self.pairs.rel_l2[row]
        first = int(self.structure.first_seen[row])
        if first < row and not pairs.equal[first] and self._same(row, first):
            self._copy(row, first)
            return
        sources = [source for source in self.structure.sources(row) if source < row]
        if first < row:
            sources.append(first)
        handed_on = any(self.wrong[source] for source in sources)
        known = [float(pairs.rel_l2[s]) for s in sources if not self.wrong[s] and not np.isnan(pairs.rel_l2[s])]
        came_in = max(known, default=0.0)
        self.tolerance[row], self.rule[row] = self._allowed(row, sources, came_in)
        if pairs.reshaped[row] or pairs.nonfinite[row]:
            self.status[row] = "shape" if pairs.reshaped[row] else "nonfinite"
        elif np.isnan(error):
            return
        elif error <= self.tolerance[row]:
            self.status[row] = "close"
            return
        else:
            self.status[row] = "diverged"
        self.wrong[row] = True
        if not handed_on:
            self.born.append(row)
            self.sources_error[row] = came_in if sources else float("nan")

    def _same(self, row: int, first: int) -> bool:
        ours, theirs = self.pairs.rel_l2[row], self.pairs.rel_l2[first]
        if not np.isfinite(ours) or not np.isfinite(theirs):
            return str(ours) == str(theirs)
        return bool(abs(ours - theirs) <= 1e-3 * theirs)

    def _copy(self, row: int, first: int) -> None:
        """The very same tensor on both sides: what was said of it before."""
        self.status[row], self.tolerance[row] = self.status[first], self.tolerance[first]
        self.rule[row], self.wrong[row] = self.rule[first], self.wrong[first]

    def _allowed(self, row: int, sources: Sequence[int], came_in: float) -> tuple[float, str]:
        pairs, policy = self.pairs, self.policy
        if policy.fixed:
            return policy.fixed_tolerance(float(pairs.l2[row]), int(pairs.elements[row])), "rtol and atol as given"
        allowed, rule = float(pairs.base[row]), "rounding of its dtype"
        if policy.noise is not None and policy.noise[row] * policy.margin > allowed:
            allowed, rule = float(policy.noise[row] * policy.margin), "measured noise"
        if policy.passed_on(came_in) > allowed:
            allowed, rule = policy.passed_on(came_in), "error that came in"
        kind = self.structure.kind[row]
        if kind == "param_grad" and pairs.dimensions[row] <= 1:
            # A sum over all positions that may cancel out, as the gradient of a bias before a softmax or a BatchNorm
            # does: its rounding is as large as that of what is summed.
            summed = max((float(pairs.l2[s]) for s in sources if self.structure.kind[s] == "grad_output"), default=0.0)
            if pairs.l2[row] > 0 and pairs.base[row] * summed / pairs.l2[row] > allowed:
                allowed, rule = float(pairs.base[row] * summed / pairs.l2[row]), "rounding of what it sums"
            elif not pairs.l2[row] and summed:
                allowed, rule = float("inf"), "rounding of what it sums"
        if kind == "param" and self.structure.number[row]:
            # Adam divides a gradient by its own size: where it is nearly zero, its noise decides the step's sign.
            noise = max(
                (float(pairs.rel_l2[s]) for s in sources if self.structure.kind[s] == "param_grad"), default=0.0
            )
            share = min(1.0, 2 * noise**0.5) if pairs.dimensions[row] > 1 else 2.0 * bool(noise)
            if (magnified := share * self._step_size(row)) > allowed and not any(self.wrong[s] for s in sources):
                allowed, rule = magnified, "its gradient's noise, as an optimizer magnifies it"
        if kind in ("output", "input") and (unseen := self._unseen_parameters(row)) > allowed:
            allowed, rule = unseen, "earlier gradients' noise in parameters that were not recorded"
        return allowed, rule

    def _step_size(self, row: int) -> float:
        """How far the optimizer moved a parameter of the reference, relative to its size."""
        rank, step, _ = self.structure.scope[row]
        before = self.structure.state.get(
            (rank, step, self.structure.module[row], "param", self.structure.path[row], 0)
        )
        return 1.0 if before is None else self.moved(before, row)

    def _unseen_parameters(self, row: int) -> float:
        """Where parameters were not recorded, what the steps before may have made of their gradients' noise."""
        rank, step, _ = self.structure.scope[row]
        module = self.structure.module[row]
        if (rank, step, module) in self.structure.parameters_of:
            return 0.0
        spot = (step, module)
        if spot not in self._unrecorded:
            worst = 0.0
            for (r, s, m, _), rows in self.structure.gradients_of.items():
                if r == rank and s < step and m == module:
                    worst = max(worst, *(float(np.nan_to_num(self.pairs.rel_l2[g])) for g in rows))
            self._unrecorded[spot] = worst**0.5
        return self._unrecorded[spot]


def judge(pairs: Pairs, structure: Structure, policy: Policy, moved: Callable[[int, int], float]) -> Judgement:
    """Judge all pairs in execution order. `moved` tells how far apart two records of the reference are, relatively."""
    return _Judge(pairs, structure, policy, moved).run()
