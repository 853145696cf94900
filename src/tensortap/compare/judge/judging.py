"""Right or wrong, and whose fault: each pair is judged against what its records were made from.

A record that is off by more than its tolerance is wrong. If what it was made from was right, the wrong was born there;
if not, it was handed on. The tolerance follows the error that came in, so that noise which grows along a deep run
raises no alarm, while a small mistake in a run that was exact so far does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.cancelling import SummedGradients
from tensortap.compare.judge.structure import Spot, Structure
from tensortap.compare.judge.tolerance import Policy
from tensortap.core.records import GRADIENT_KINDS

__all__ = ["UNSEEN_PARAMETERS", "Isolated", "Judgement", "Pairs", "judge"]

Floats = npt.NDArray[np.float64]
_ROUNDING = "rounding of its dtype"
UNSEEN_PARAMETERS = "earlier gradients' noise in parameters that were not recorded"
_CANCELLED = 4.0
_MOST_CANCELLED = 16.0
"""Of its own rounding: of a gradient that is small for another reason, as behind a small factor, not all is allowed."""
_FLOWING = ("input", "output", "grad_output", "grad_input")


@dataclass(frozen=True)
class Isolated:
    """Of pairs of modules that stand for themselves."""

    forced: npt.NDArray[np.bool_]
    """Where the reference's values took the candidate's place, so that nothing was handed on."""
    cast: npt.NDArray[np.bool_]
    """Where these values are of another dtype than the reference's, so that they are rounded ones."""


@dataclass(frozen=True)
class Pairs:
    """The numbers of all pairs that judging needs, in execution order."""

    error: Floats
    """The relative L2 error, or the worst row's over `row_gain` if that is more; 0 where equal, NaN where not known."""
    row_gain: Floats
    """How many times the tolerance one row may be off."""
    l2: Floats
    """Of the reference."""
    std: Floats
    """Of the reference."""
    apart: Floats
    """The distance of both sides, not relative to anything; NaN where it is not known."""
    elements: npt.NDArray[np.int64]
    equal: npt.NDArray[np.bool_]
    nonfinite: npt.NDArray[np.bool_]
    """One side has NaN or Inf where the other has not."""
    reshaped: npt.NDArray[np.bool_]
    dimensions: npt.NDArray[np.int64]
    base: Floats
    """Tolerance if all it was made from is right."""
    limits: Mapping[int, str] = field(default_factory=dict)
    """Pairs of which too little is known to call them right, and why. Their error is a lower bound, or NaN."""
    isolated: Isolated | None = None
    """What else is known if every module was fed from the reference."""


@dataclass(frozen=True)
class Judgement:
    """For every pair: status, tolerance and rule; and for the wrong ones whether they were born there."""

    status: list[str]
    tolerance: Floats
    row_tolerance: Floats
    rule: list[str]
    born: list[int]
    """Rows, in execution order."""
    sources_error: dict[int, float]
    """For each born row, the worst error among what it was made from; NaN if nothing of that was recorded."""
    deprived: set[Spot]
    """Of the calls that got no gradient at an output, those whose own gradients are wrong."""


class _Judge:
    """Walks through the pairs that are off by more than rounding. Numbers are in lists: it looks at few at a time."""

    def __init__(
        self,
        pairs: Pairs,
        structure: Structure,
        policy: Policy,
        moved: Callable[[int, int], float],
        deprived: Collection[Spot],
    ) -> None:
        self.pairs = pairs
        self.deprived = deprived
        self.felt: set[Spot] = set()
        self.moved = moved
        self.structure = structure
        self.policy = policy
        count = len(pairs.error)
        self.error: list[float] = pairs.error.tolist()
        alone = pairs.isolated
        self.forced: list[bool] = [False] * count if alone is None else alone.forced.tolist()
        self.handed: list[float] = [0.0 if forced else e for forced, e in zip(self.forced, self.error, strict=True)]
        self.l2: list[float] = pairs.l2.tolist()
        self.base: list[float] = pairs.base.tolist()
        self._summed = SummedGradients(structure, self.l2, pairs.std, self.base, pairs.elements, pairs.dimensions)
        self.wrong = [False] * count
        self._worst_output: dict[tuple[int, int, int], int] = {}
        """By rank, step and micro step, the output with the largest error of all that are right so far."""
        self._passed = 0
        """The records before this one are in `_worst_output`."""
        self.born: list[int] = []
        self.sources_error: dict[int, float] = {}
        self._noise_of_gradients: dict[str | None, tuple[list[int], list[float]]] | None = None
        # Kinds of what is wrong, and of what is not finite, so far: by rank and step.
        self._wrong_kinds: dict[tuple[int, int], set[str]] = {}
        self._lost_kinds: dict[tuple[int, int], set[str]] = {}
        # What is equal, or off by no more than its own rounding, needs no look at what it was made from.
        self.open = ~pairs.equal & ~(pairs.error <= pairs.base) & ~np.isnan(pairs.error)
        if policy.fixed:
            self.open = ~pairs.equal & ~np.isnan(pairs.error)
        close = ~pairs.equal & ~self.open & ~np.isnan(pairs.error)
        self.status: list[str] = np.where(pairs.equal, "equal", np.where(close, "close", "unjudged")).tolist()
        rule = np.where(pairs.equal, "bitwise", np.where(close, _ROUNDING, "nothing to go by"))
        self.rule: list[str] = rule.tolist()
        self.tolerance = self.base.copy()

    def run(self) -> Judgement:
        for row in np.flatnonzero(self.open).tolist():
            self._judge(row)
        for row, why in self.pairs.limits.items():
            if self.status[row] in ("close", "unjudged"):
                self.status[row], self.rule[row] = "unjudged", why
        tolerance = np.array(self.tolerance)
        with np.errstate(invalid="ignore"):  # of what must be equal there is no row to allow for
            row_tolerance = tolerance * self.pairs.row_gain
        return Judgement(self.status, tolerance, row_tolerance, self.rule, self.born, self.sources_error, self.felt)

    def _judge(self, row: int) -> None:
        error, first = self.error[row], self.structure.first_seen[row]
        if first < row and self.open[first] and self._same(error, self.handed[first]):
            self._copy(row, first)
            return
        sources = [source for source in self.structure.sources(row) if source < row]
        if first < row:
            sources.append(first)
        wrong = self.wrong
        lacking = self._lacking(row)
        recorded = bool(sources)
        handed_on = any(wrong[source] for source in sources) or bool(lacking)
        if not recorded and self.pairs.isolated is None:
            handed_on = handed_on or self._wrong_before(row)
        sources += self._stand_in(row, sources)
        came_in = max((self.handed[s] for s in sources if not wrong[s] and self.error[s] == self.error[s]), default=0.0)
        if not handed_on or self.policy.fixed:
            self.tolerance[row], self.rule[row] = self._allowed(row, sources, came_in)
        else:
            self.rule[row] = _ROUNDING
        if self.pairs.reshaped[row] or self.pairs.nonfinite[row]:
            self.status[row] = "shape" if self.pairs.reshaped[row] else "nonfinite"
        elif error <= self.tolerance[row]:
            self.status[row] = "close"
            if self.structure.kind[row] == "param_grad":
                self._summed.arrived(row, error)
            return
        else:
            self.status[row] = "diverged"
        wrong[row] = not self.forced[row]
        self.felt.update(lacking)
        spot, kind = self.structure.scope[row][:2], self.structure.kind[row]
        if self.status[row] == "nonfinite":
            handed_on = handed_on or self._came_through_parameters(row, self._lost_kinds)
            self._lost_kinds.setdefault(spot, set()).add(kind)
        self._wrong_kinds.setdefault(spot, set()).add(kind)
        if not handed_on:
            self.born.append(row)
            self.sources_error[row] = came_in if recorded else float("nan")

    def _stand_in(self, row: int, sources: Sequence[int]) -> list[int]:
        """The worst right output before a record whose inputs were not recorded: its inputs may be as far off."""
        kinds = self.structure.kind
        for passed in range(self._passed, row):
            if kinds[passed] == "output" and not self.wrong[passed] and self.error[passed] == self.error[passed]:
                scope = self.structure.scope[passed]
                if (worst := self._worst_output.get(scope)) is None or self.error[passed] > self.error[worst]:
                    self._worst_output[scope] = passed
        self._passed = max(self._passed, row)
        outside = kinds[row] in ("param", "buffer") or (kinds[row] == "input" and not self.structure.module[row])
        if outside or self.pairs.isolated is not None or any(kinds[source] in _FLOWING for source in sources):
            return []
        worst = self._worst_output.get(self.structure.scope[row])
        return [] if worst is None else [worst]

    def _lacking(self, row: int) -> list[Spot]:
        """The calls that a gradient was made in without one at an output that the reference has."""
        if not self.deprived or self.structure.kind[row] not in GRADIENT_KINDS:
            return []
        return [call.spot for call in self.structure.made_in(row) if call.spot in self.deprived]

    def _wrong_before(self, row: int) -> bool:
        """Whether a record of which nobody knows what it was made from comes after something wrong: then it is no place
        to begin with. What the model itself is given comes from outside, and so do parameters at first."""
        kind = self.structure.kind[row]
        if kind == "input" and not self.structure.module[row]:
            return False
        same_step = kind not in ("param", "buffer") and self.structure.scope[row][:2] in self._wrong_kinds
        return same_step or self._came_through_parameters(row, self._wrong_kinds)

    def _rounding_of(self, row: int, sources: Sequence[int], isolated: Isolated) -> float:
        """What rounding allows that came in unseen: with values that were cast; or where short numbers are worked on
        and the result is kept in long ones, as gradients and running statistics are."""
        kinds = self.structure.kind
        kept = kinds[row] in GRADIENT_KINDS or kinds[row] == "buffer"
        return max((self.base[s] for s in sources if isolated.cast[s] or (kept and kinds[s] in _FLOWING)), default=0.0)

    @staticmethod
    def _same(error: float, other: float) -> bool:
        return error == other or abs(error - other) <= 1e-3 * other < float("inf")

    def _copy(self, row: int, first: int) -> None:
        """The very same tensor on both sides: what was said of it before."""
        self.status[row], self.tolerance[row] = self.status[first], self.tolerance[first]
        self.rule[row], self.wrong[row] = self.rule[first], self.wrong[first]

    def _allowed(self, row: int, sources: Sequence[int], came_in: float) -> tuple[float, str]:
        pairs, policy = self.pairs, self.policy
        if policy.fixed:
            return policy.fixed_tolerance(float(pairs.l2[row]), int(pairs.elements[row])), "rtol and atol as given"
        allowed, rule = self.base[row], _ROUNDING
        if policy.noise is not None and policy.noise[row] > allowed:
            allowed, rule = float(policy.noise[row]), "measured noise"
        if pairs.isolated is not None and (coarse := self._rounding_of(row, sources, pairs.isolated)) > allowed:
            allowed, rule = coarse, "rounding of what it was made from"
        if policy.passed_on(came_in) > allowed:
            allowed, rule = policy.passed_on(came_in), "error that came in"
        kind = self.structure.kind[row]
        if kind in GRADIENT_KINDS:
            # Where an activation crosses a kink, as in a ReLU or a maximum, its gradient jumps: of activations that are
            # off by e, about a share of e does, which moves the gradient by the root of it.
            activations = [s for s in sources if self.structure.kind[s] in ("input", "output") and not self.wrong[s]]
            forward = max((self.handed[s] for s in activations if self.error[s] == self.error[s]), default=0.0)
            if 2 * forward**0.5 > allowed:
                allowed, rule = 2 * forward**0.5, "error of the activations"
            if kind == "param_grad" and (coarse := max((self.base[s] for s in activations), default=0.0) / 8) > allowed:
                allowed, rule = coarse, "rounding of the activations' dtype"
            if kind == "param_grad" and (unseen := self._summed.unseen(row, sources)) > allowed:
                allowed, rule = unseen, "error of gradients that were not recorded"
        if kind in ("grad_output", "grad_input"):
            # What is sent back may cancel out, as from a norm under a loss that does not see the scale, or to a query
            # that a softmax does not see: its rounding is as large as that of what came in.
            given = max((self.l2[s] for s in sources if self.structure.kind[s] in GRADIENT_KINDS), default=0.0)
            times = _CANCELLED * given / self.l2[row] if 0 < _CANCELLED * self.l2[row] < given else 0.0
            if not policy.mapped:
                times = min(times, _MOST_CANCELLED)
            if times * self.base[row] > allowed:
                allowed, rule = times * self.base[row], "rounding of what cancels out in it"
        if kind == "param_grad" and pairs.dimensions[row] <= 1:
            rounding = self._summed.rounding(row, sources, self.error, self.wrong)
            if self.l2[row] > 0 and rounding / self.l2[row] > allowed:
                allowed, rule = rounding / self.l2[row], "rounding of what it sums"
            elif not self.l2[row] and pairs.apart[row] <= rounding:
                allowed, rule = float("inf"), "rounding of what it sums"
        if kind == "param":
            # Adam divides a gradient by its own size: where it is nearly zero, its noise decides the step's sign.
            noise = self._noise_behind(row, sources)
            flipped = (8 if policy.mapped else 2) * noise**0.5  # other kernels, other zeros
            share = min(1.0, flipped) if pairs.dimensions[row] > 1 else 2.0 * bool(noise)
            if (magnified := share * self._step_size(row)) > allowed and not any(self.wrong[s] for s in sources):
                allowed, rule = magnified, "its gradient's noise, as an optimizer magnifies it"
        if kind in ("output", "input") and (unseen := self._unseen_parameters(row)) > allowed:
            allowed, rule = unseen, UNSEEN_PARAMETERS
        return allowed, rule

    def _noise_behind(self, row: int, sources: Sequence[int]) -> float:
        """Of the gradients that moved a parameter. One that has none and moves all the same follows others, as an
        average of a network's past does."""
        own = [s for s in sources if self.structure.kind[s] == "param_grad"]
        rank, step, _ = self.structure.scope[row]
        at = rank, step if self.structure.number[row] else step - 1  # before a step: since the one before
        errors = [self.error[s] for s in own or self._gradients_in.get(at, [])]
        return max((error for error in errors if error < float("inf")), default=0.0)

    @cached_property
    def _gradients_in(self) -> dict[tuple[int, int], list[int]]:
        """All rows of parameters' gradients, by rank and step."""
        found: dict[tuple[int, int], list[int]] = {}
        for (rank, step, _, _), rows in self.structure.gradients_of.items():
            found.setdefault((rank, step), []).extend(rows)
        return found

    def _step_size(self, row: int) -> float:
        """How far a parameter of the reference was moved since it was last recorded, relative to its size."""
        rank, step, _ = self.structure.scope[row]
        last = (step, 0) if self.structure.number[row] else (step - 1, 1)
        before = self.structure.state.get(
            (rank, last[0], self.structure.module[row], "param", self.structure.path[row], last[1])
        )
        return 1.0 if before is None else self.moved(before, row)

    def _unseen_parameters(self, row: int) -> float:
        """Where parameters were not recorded, what the steps before may have made of their gradients' noise."""
        rank, step, _ = self.structure.scope[row]
        module = self.structure.module[row]
        if (rank, step, module) in self.structure.parameters_of:
            return 0.0
        if not step:
            return 0.0
        if self._noise_of_gradients is None:
            self._noise_of_gradients = self._collect_noise()
        known = None if module in self.structure.frozen else module  # then it is an average of others, if it moves
        steps, worst = self._noise_of_gradients.get(known, ((), ()))
        before = bisect_left(steps, step)
        return worst[before - 1] ** 0.5 if before else 0.0

    def _came_through_parameters(self, row: int, bad: Mapping[tuple[int, int], Collection[str]]) -> bool:
        """Whether what is bad, as a NaN, may have come from the step before through parameters that were not recorded:
        through their gradients, if these were."""
        rank, step, _ = self.structure.scope[row]
        before = (rank, self._step_before.get((rank, step), -1))
        kinds = bad.get(before, ())
        if not kinds or "param" in self._recorded[rank, step]:
            return False
        return "param_grad" in kinds or "param_grad" not in self._recorded[before]

    @cached_property
    def _recorded(self) -> dict[tuple[int, int], set[str]]:
        """The kinds that each step of a rank has."""
        found: dict[tuple[int, int], set[str]] = {}
        for (rank, step, _), kind in zip(self.structure.scope, self.structure.kind, strict=True):
            found.setdefault((rank, step), set()).add(kind)
        return found

    @cached_property
    def _step_before(self) -> dict[tuple[int, int], int]:
        spots = sorted(self._recorded)
        return {spot: before[1] for before, spot in pairwise(spots) if before[0] == spot[0]}

    def _collect_noise(self) -> dict[str | None, tuple[list[int], list[float]]]:
        """By module, and for all of them under None: the steps that have parameter gradients, and the worst error of
        any up to each, on any rank: what an optimizer uses may be the mean over all of them."""
        found: dict[str | None, dict[int, float]] = {}
        for (_, step, module, _), rows in self.structure.gradients_of.items():
            errors = [min(1.0, self.error[row]) for row in rows if self.error[row] == self.error[row]]
            for name in (module, None):
                steps = found.setdefault(name, {})
                steps[step] = max(steps.get(step, 0.0), *errors, 0.0)
        return {
            module: (sorted(steps), list(accumulate((steps[step] for step in sorted(steps)), max)))
            for module, steps in found.items()
        }


def judge(
    pairs: Pairs,
    structure: Structure,
    policy: Policy,
    moved: Callable[[int, int], float],
    deprived: Collection[Spot] = (),
) -> Judgement:
    """Judge all pairs in execution order. `moved` tells how far apart two records of the reference are, relatively;
    `deprived` are calls that lack a gradient at an output: see `lost.without_gradient`."""
    return _Judge(pairs, structure, policy, moved, deprived).run()
