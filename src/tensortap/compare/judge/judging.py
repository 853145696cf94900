"""Right or wrong, and where it began: judge each pair against the sources of its records.

A record that is off by more than its tolerance is wrong. If its sources are right, it is a birth; otherwise the error
propagated. The tolerance follows the incoming error: noise that grows along a deep run raises no alarm, while a small
mistake in a run that was exact so far does. `rules` has all tolerances.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from tensortap.compare.judge.pairs import Floats, Pairs
from tensortap.compare.judge.rules import ROUNDING, find_tolerance
from tensortap.compare.judge.rules.evidence import Evidence, JudgedPair
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.structure import Spot, Structure
from tensortap.core.records import GRADIENT_KINDS

__all__ = ["Judgement", "judge"]

_FLOWING = ("input", "output", "grad_output", "grad_input")


@dataclass(frozen=True)
class Judgement:
    """For every pair: status, tolerance and rule; and for the wrong ones whether they are births."""

    status: list[str]
    tolerance: Floats
    row_tolerance: Floats
    rule: list[str]
    born: list[int]
    """Rows, in execution order."""
    sources_error: dict[int, float]
    """For each born row, the worst error among its sources; NaN if none was recorded."""
    affected_calls: set[Spot]
    """Calls without a gradient at an output whose own gradients are wrong."""


class _Judge:
    """Judges the pairs that are off by more than rounding, in execution order."""

    def __init__(self, evidence: Evidence, calls_without_gradient: Collection[Spot]) -> None:
        pairs, policy = evidence.pairs, evidence.policy
        self.evidence = evidence
        self.pairs = pairs
        self.structure = evidence.structure
        self.calls_without_gradient = calls_without_gradient
        self.affected_calls: set[Spot] = set()
        self.born: list[int] = []
        self.sources_error: dict[int, float] = {}
        self._worst_output: dict[tuple[int, int, int], int] = {}
        """By rank, step and micro step: the output with the largest error of all that are right so far."""
        self._passed = 0
        """The records before this one are in `_worst_output`."""
        self._wrong_kinds: dict[tuple[int, int], set[str]] = {}
        """By rank and step: kinds of the records that are wrong so far."""
        self._nonfinite_kinds: dict[tuple[int, int], set[str]] = {}
        # Pairs that are equal, or off by no more than their own rounding, are right whatever their sources are.
        self.open = ~pairs.equal & ~(pairs.error <= pairs.base) & ~np.isnan(pairs.error)
        if policy.fixed:
            self.open = ~pairs.equal & ~np.isnan(pairs.error)
        close = ~pairs.equal & ~self.open & ~np.isnan(pairs.error)
        self.status: list[str] = np.where(pairs.equal, "equal", np.where(close, "close", "unjudged")).tolist()
        rule = np.where(pairs.equal, "bitwise", np.where(close, ROUNDING, "no evidence"))
        self.rule: list[str] = rule.tolist()
        self.tolerance = evidence.base.copy()

    def run(self) -> Judgement:
        for row in np.flatnonzero(self.open).tolist():
            self._judge(row)
        for row, why in self.pairs.limits.items():
            if self.status[row] in ("close", "unjudged"):
                self.status[row], self.rule[row] = "unjudged", why
        tolerance = np.array(self.tolerance)
        with np.errstate(invalid="ignore"):  # pairs that must be equal have no row to allow for
            row_tolerance = tolerance * self.pairs.row_gain
        return Judgement(
            self.status, tolerance, row_tolerance, self.rule, self.born, self.sources_error, self.affected_calls
        )

    def _judge(self, row: int) -> None:
        evidence = self.evidence
        error, wrong, first = evidence.error[row], evidence.wrong, self.structure.first_seen[row]
        if first < row and self.open[first] and _is_nearly(error, evidence.propagated[first]):
            self._copy_judgement(row, first)
            return
        sources = [source for source in self.structure.sources(row) if source < row]
        if first < row:
            sources.append(first)
        lacking = self._calls_that_lack_a_gradient(row)
        recorded = bool(sources)
        propagated = any(wrong[source] for source in sources) or bool(lacking)
        if not recorded and self.pairs.isolated is None:
            propagated = propagated or self._follows_something_wrong(row)
        sources += self._substitute_source(row, sources)
        incoming = max((evidence.propagated[s] for s in sources if not wrong[s] and evidence.is_known(s)), default=0.0)
        if not propagated or evidence.policy.fixed:
            self.tolerance[row], self.rule[row] = find_tolerance(JudgedPair(evidence, row, sources, incoming))
        else:
            self.rule[row] = ROUNDING
        if self.pairs.reshaped[row] or self.pairs.nonfinite[row]:
            self.status[row] = "shape" if self.pairs.reshaped[row] else "nonfinite"
        elif error <= self.tolerance[row]:
            self.status[row] = "close"
            if self.structure.kind[row] == "param_grad":
                evidence.summed.add_right_gradient(row, error)
            return
        else:
            self.status[row] = "diverged"
        wrong[row] = not evidence.forced[row]
        self.affected_calls.update(lacking)
        step, kind = self.structure.scope[row][:2], self.structure.kind[row]
        if self.status[row] == "nonfinite":
            propagated = propagated or self._came_through_parameters(row, self._nonfinite_kinds)
            self._nonfinite_kinds.setdefault(step, set()).add(kind)
        self._wrong_kinds.setdefault(step, set()).add(kind)
        if not propagated:
            self.born.append(row)
            self.sources_error[row] = incoming if recorded else float("nan")

    def _copy_judgement(self, row: int, first: int) -> None:
        """Judge a record of the very same two tensors as the first one."""
        self.status[row], self.tolerance[row] = self.status[first], self.tolerance[first]
        self.rule[row], self.evidence.wrong[row] = self.rule[first], self.evidence.wrong[first]

    def _substitute_source(self, row: int, sources: Sequence[int]) -> list[int]:
        """Return the worst right output before a record whose inputs were not recorded: they may be as far off."""
        kinds, evidence = self.structure.kind, self.evidence
        for passed in range(self._passed, row):
            if kinds[passed] == "output" and not evidence.wrong[passed] and evidence.is_known(passed):
                scope = self.structure.scope[passed]
                worst = self._worst_output.get(scope)
                if worst is None or evidence.error[passed] > evidence.error[worst]:
                    self._worst_output[scope] = passed
        self._passed = max(self._passed, row)
        outside = kinds[row] in ("param", "buffer") or (kinds[row] == "input" and not self.structure.module[row])
        if outside or self.pairs.isolated is not None or any(kinds[source] in _FLOWING for source in sources):
            return []
        worst = self._worst_output.get(self.structure.scope[row])
        return [] if worst is None else [worst]

    def _calls_that_lack_a_gradient(self, row: int) -> list[Spot]:
        """Return the calls whose backward made a gradient without one at an output that the reference has."""
        if not self.calls_without_gradient or self.structure.kind[row] not in GRADIENT_KINDS:
            return []
        return [call.spot for call in self.structure.made_in(row) if call.spot in self.calls_without_gradient]

    def _follows_something_wrong(self, row: int) -> bool:
        """Whether a record with unknown sources comes after something wrong: then it is not a birth. Inputs of the
        model, and parameters at first, come from outside."""
        kind = self.structure.kind[row]
        if kind == "input" and not self.structure.module[row]:
            return False
        same_step = kind not in ("param", "buffer") and self.structure.scope[row][:2] in self._wrong_kinds
        return same_step or self._came_through_parameters(row, self._wrong_kinds)

    def _came_through_parameters(self, row: int, bad: Mapping[tuple[int, int], Collection[str]]) -> bool:
        """Whether something bad, such as a NaN, may have come from the step before through unrecorded parameters: by
        way of their gradients, if these were recorded."""
        rank, step, _ = self.structure.scope[row]
        before = (rank, self._step_before.get((rank, step), -1))
        kinds = bad.get(before, ())
        if not kinds or "param" in self._recorded_kinds[rank, step]:
            return False
        return "param_grad" in kinds or "param_grad" not in self._recorded_kinds[before]

    @cached_property
    def _recorded_kinds(self) -> dict[tuple[int, int], set[str]]:
        """By rank and step."""
        found: dict[tuple[int, int], set[str]] = {}
        for (rank, step, _), kind in zip(self.structure.scope, self.structure.kind, strict=True):
            found.setdefault((rank, step), set()).add(kind)
        return found

    @cached_property
    def _step_before(self) -> dict[tuple[int, int], int]:
        steps = sorted(self._recorded_kinds)
        return {step: before[1] for before, step in pairwise(steps) if before[0] == step[0]}


def _is_nearly(error: float, other: float) -> bool:
    return error == other or abs(error - other) <= 1e-3 * other < float("inf")


def judge(
    pairs: Pairs,
    structure: Structure,
    policy: Policy,
    reference_moved: Callable[[int, int], float],
    calls_without_gradient: Collection[Spot] = (),
) -> Judgement:
    """Judge all pairs in execution order.

    reference_moved: how far apart two records of the reference are, relative to the first.
    calls_without_gradient: see `one_sided.find_calls_without_gradient`.
    """
    return _Judge(Evidence(pairs, structure, policy, reference_moved), calls_without_gradient).run()
