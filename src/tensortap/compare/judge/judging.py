"""Right or wrong, and where it began: judge each pair against the sources of its records.

A record that is off by more than its tolerance is wrong. If its sources are right, it is a birth; otherwise the error
propagated. The tolerance follows the incoming error: noise that grows along a deep run raises no alarm, while a small
mistake in a run that was exact so far does. `rules` has all tolerances.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Ints
from tensortap.compare.judge.few_elements import FewElements
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.moved_tokens import MovedTokens
from tensortap.compare.judge.operators import judge_operators
from tensortap.compare.judge.pairs import Floats
from tensortap.compare.judge.rules.conditioning import CANCELLED_ERROR, CANCELLED_SUM, explain_by_conditioning
from tensortap.compare.judge.rules.doubts import doubt_rounding
from tensortap.compare.judge.rules.evidence import Evidence, JudgedPair
from tensortap.compare.judge.rules.margins import MOST_ASSUMED
from tensortap.compare.judge.rules.names import (
    CANCELLED_GRADIENT,
    FEW_STEPS,
    KINK,
    MOST_CAME_IN,
    OTHER_GELU,
    ROUNDING,
    SAME_MASK,
    UNSEEN_PARAMETERS,
    UNSEEN_USE,
)
from tensortap.compare.judge.rules.tolerance import find_tolerance, is_drowned
from tensortap.compare.judge.rules.unseen import (
    CANCELLED_LOSS,
    CANCELS_INSIDE,
    doubt_unseen_code,
    explain_by_unseen_code,
)
from tensortap.compare.judge.steps.calls import Spot
from tensortap.compare.judge.ties import Ties
from tensortap.compare.judge.unseen_makers import layer_around
from tensortap.compare.judge.worst_outputs import WorstOutputs
from tensortap.compare.judge.wrong_so_far import WrongSoFar
from tensortap.core.records import GRADIENT_KINDS, WRONG_STATUSES

__all__ = ["CallsWithoutGradient", "PairJudge", "are_nearly"]

_FLOWING = ("input", "output", "grad_output", "grad_input")
_FLOWING_GRADIENTS = ("grad_output", "grad_input")


@dataclass(frozen=True)
class CallsWithoutGradient:
    """Calls of the candidate that lack a gradient which the reference's have."""

    at_output: frozenset[Spot] = frozenset()
    sent: frozenset[Spot] = frozenset()
    """Calls that send none to one of their inputs."""


class PairJudge:
    """Judges the pairs that are off by more than rounding, one by one, in execution order."""

    def __init__(self, evidence: Evidence, without_gradient: CallsWithoutGradient) -> None:
        pairs, policy = evidence.pairs, evidence.policy
        self.evidence = evidence
        self.pairs = pairs
        self.structure = evidence.structure
        self.calls_without_gradient = set(without_gradient.at_output)
        self.calls_that_send_none = without_gradient.sent
        self.affected_calls: set[Spot] = set()
        self.ties = Ties(evidence)
        self.few_elements = FewElements(evidence)
        self.moved_tokens = MovedTokens(evidence)
        self.wrong_so_far = WrongSoFar(evidence.structure)
        self._cancelling: set[int] = set()
        self._unsupported: set[int] = set()
        self.born: list[int] = []
        self.sources_error: dict[int, float] = {}
        self.worst_outputs = WorstOutputs(evidence)
        self._unseen_uses: dict[int, Spot] = {}
        """Gradients of outputs that one side alone uses inside its model, unseen, and the calls that return these."""
        # Pairs that are equal, or off by no more than their own rounding, are right whatever their sources are.
        self.open = ~pairs.equal & ~(pairs.error <= pairs.base) & ~np.isnan(pairs.error)
        if policy.fixed:
            self.open = ~pairs.equal & ~np.isnan(pairs.error)
        close = ~pairs.equal & ~self.open & ~np.isnan(pairs.error)
        self.open[self.structure.operators] = False
        self.open[list(pairs.other_gelus)] = True
        which = np.where(pairs.equal, 0, np.where(close, 1, 2)).astype(np.int8).tolist()
        # Equal words are one object: there are as many as pairs.
        self.status = list(map(("equal", "close", "unjudged").__getitem__, which))
        self.rule = list(map(("bitwise", ROUNDING, "no evidence").__getitem__, which))
        for row in pairs.masks:
            self.rule[row] = SAME_MASK
        self._ambiguous: set[int] = set()
        """Masks that are the same if True means "hidden": they are wrong only if something made from them is."""
        self.tolerance = array("d", evidence.base)
        self._is_open = self.open.tobytes()
        self._is_broken = (pairs.reshaped | pairs.nonfinite).tobytes()
        self._is_fixed = policy.fixed

    def run(self) -> Judgement:
        self.judge_open(np.flatnonzero(self.open))
        for row, spot in self._unseen_uses.items():
            # It is not used there either, if what depends on it is wrong, and the layer itself is right.
            if spot in self.affected_calls and not self._is_wrong_layer(spot):
                self.status[row] = "diverged"
                self.born = sorted([*self.born, row])
                self.sources_error[row] = float("nan")
        for row in np.flatnonzero(self.open & (self.pairs.error > MOST_ASSUMED)).tolist():
            drowned = is_drowned(self.structure.kind[row], self.rule[row], self.evidence.error[row])
            if drowned and self.status[row] == "close" and row not in self._cancelling:
                self.status[row], self.rule[row] = "unjudged", MOST_CAME_IN
        judge_operators(self.evidence, self.status, self.rule, self.tolerance)
        for row, why in self.pairs.limits.items():
            if self.status[row] in ("close", "unjudged"):
                self.status[row], self.rule[row] = "unjudged", why
        tolerance = np.array(self.tolerance)
        with np.errstate(invalid="ignore"):  # pairs that must be equal have no row to allow for
            row_tolerance = tolerance * self.pairs.row_gain
        return Judgement(
            self.status,
            tolerance,
            row_tolerance,
            self.rule,
            self.born,
            self.sources_error,
            self.affected_calls,
            self.few_elements.kinks,
            self.ties.choices,
            frozenset(row for row in self._cancelling if self.status[row] == "close"),
            frozenset(row for row in self._unsupported if self.status[row] == "close"),
        )

    def judge_open(self, rows: Ints) -> None:
        for row in rows.tolist():
            self.judge_pair(row)

    def judge_pair(self, row: int) -> None:
        evidence = self.evidence
        error, wrong, first = evidence.error[row], evidence.wrong, self.structure.first_seen[row]
        known = first < row and self._is_open[first]
        if known and (first in self.ties or _is_nearly(error, evidence.propagated[first])):
            self._copy_judgement(row, first)
            return
        sources = [source for source in self.structure.sources(row) if source < row]
        if first < row:
            sources.append(first)
        lacking = self._calls_that_lack_a_gradient(row)
        after_wrong = any(map(wrong.__getitem__, sources)) or self._is_made_in_wrong_layer(row)
        if not after_wrong and (tie := self.ties.status_of_choice(row, sources)):
            self.status[row], self.rule[row] = tie
            return
        recorded = bool(sources)
        propagated = after_wrong or bool(lacking)
        if not recorded and self.pairs.isolated is None and self.wrong_so_far.may_reach(row):
            after_wrong = propagated = True
        incoming = 0.0
        if not after_wrong:
            sources += self._substitute_source(row, sources)
            right = [evidence.propagated[s] for s in sources if not wrong[s] and evidence.is_known(s)]
            incoming = max(right, default=0.0)
        if not after_wrong or self._is_fixed:  # what lacks a gradient may still be right
            tolerance = find_tolerance(JudgedPair(evidence, row, sources, incoming))
            self.tolerance[row], self.rule[row] = tolerance.allowed, tolerance.rule
        else:
            self.rule[row] = ROUNDING
        if row in self.ties.mistaken:
            self.tolerance[row], self.rule[row] = 0.0, ROUNDING
        elif row in self.pairs.other_gelus:
            self.tolerance[row], self.rule[row] = 0.0, OTHER_GELU
        if row in self.pairs.masks and self.pairs.masks[row].ambiguous:
            self._ambiguous.add(row)
            evidence.discount(row)  # its number says nothing about what is made from it
            self.status[row] = "unjudged"
            return
        is_broken = self._is_broken[row]
        too_far = (is_broken and self.pairs.reshaped[row]) or not error <= self.tolerance[row]
        may_follow = (
            too_far
            and (not propagated or (self.ties and not after_wrong))
            and not (is_broken and self.pairs.nonfinite[row])
        )
        if may_follow and (tie := self._follows_tie(row, sources)):
            self.status[row], self.rule[row] = tie
            return
        if too_far and not propagated and (doubt := self.moved_tokens.doubt(row, sources, self.tolerance[row])):
            self.status[row], self.rule[row] = "unjudged", doubt
            return
        if is_broken:
            self.status[row] = "shape" if self.pairs.reshaped[row] else "nonfinite"
        elif error <= self.tolerance[row]:
            self.status[row] = "close"
            self._note_cancelling(row, sources)
            if self.rule[row] == UNSEEN_PARAMETERS and error > tolerance.recorded:
                self._unsupported.add(row)
            if self.structure.kind[row] == "param_grad":
                evidence.summed.add_right_gradient(row, error)
            return
        elif not propagated and self.few_elements.crossed_a_kink(row, sources, self.tolerance[row]):
            self.status[row], self.rule[row] = "close", KINK
            return
        elif not propagated and self.few_elements.took_other_steps(row, sources, self.tolerance[row]):
            self.status[row], self.rule[row] = "close", FEW_STEPS
            return
        elif not propagated and (rule := self._explain_by_conditioning(row, sources)):
            self.status[row], self.rule[row] = "close", rule
            self._note_cancelling(row, sources)
            if self.structure.kind[row] == "param_grad":
                evidence.summed.add_right_gradient(row, error, is_of_loss=rule == CANCELLED_LOSS)
            return
        elif not after_wrong and (spot := self._returned_unseen(row)) is not None:
            self._unseen_uses[row] = spot
            self.calls_without_gradient.add(spot)
            evidence.discount(row)
            self.status[row], self.rule[row] = "unjudged", UNSEEN_USE
            return
        elif not propagated and (doubt := self._doubt(row, sources)):
            self.status[row], self.rule[row] = "unjudged", doubt
            return
        else:
            self.status[row] = "diverged"
        if self.status[row] == "nonfinite":
            propagated = propagated or self.wrong_so_far.nonfinite_may_reach(row)
        self._mark_wrong(row)
        self.affected_calls.update(lacking)
        if not propagated and (masks := [source for source in sources if source in self._ambiguous]):
            self._blame_mask(masks[0])
            propagated = True
        if not propagated:
            self.born.append(row)
            self.sources_error[row] = incoming if recorded else float("nan")

    def _mark_wrong(self, row: int) -> None:
        self.evidence.wrong[row] = not self.evidence.forced[row]
        self.wrong_so_far.add(row, self.status[row] == "nonfinite")

    def _is_made_in_wrong_layer(self, row: int) -> bool:
        """Whether a value is made unseen inside a layer whose own outputs are wrong."""
        maker, call = self.pairs.made_unseen.get(row), self.structure.call_of(row)
        if maker is None or call is None or self.structure.kind[row] != "output":
            return False
        layer = layer_around(self.structure, call.scope, maker)
        return layer is not None and layer is not call and self._is_wrong_layer(layer.spot)

    def _is_wrong_layer(self, spot: Spot) -> bool:
        """Whether outputs of a call inside the model are wrong."""
        scope, module, number = spot
        calls = self.structure.calls_of_module.get((scope, module), ()) if module else ()
        outputs = [row for call in calls if call.number == number for row in call.of("output")]
        return any(self.status[row] in WRONG_STATUSES for row in outputs)

    def _returned_unseen(self, row: int) -> Spot | None:
        """Return the call of a model of which nothing inside is seen, if this is the gradient of one of its outputs.

        A compiled model reads some of its outputs itself, as for its loss: the gradient of these is only what comes
        from outside. It matters if gradients of parameters are wrong, too. In an isolated check, a compiled layer is
        such a model: it is given that gradient, and not the reference's.
        """
        call = self.structure.call_of(row) if self.structure.kind[row] == "grad_output" else None
        if call is None or self.evidence.policy.fixed or self.evidence.forced[row]:
            return None
        if (maker := self.pairs.made_unseen.get(row)) is not None:
            unseen = layer_around(self.structure, call.scope, maker)
            return None if unseen is None else unseen.spot
        if call.parent is not None:
            if self.pairs.isolated is None:
                return None
            layer = self.structure.innermost(row, call)
            return layer.spot if not layer.children and self.structure.held_inside(layer) else None
        if call.children:
            return None
        gradients = self.structure.own_gradients.items_in(*call.scope[:2])
        inside = any(module != call.module for (scope, module), _ in gradients if scope == call.scope)
        return call.spot if inside else None

    def _follows_tie(self, row: int, sources: Sequence[int]) -> tuple[str, str] | None:
        return self.ties.status_of_follower(row, sources, self.tolerance[row])

    def _note_cancelling(self, row: int, sources: Sequence[int]) -> None:
        """Note a gradient that needs more tolerance than any but one that cancels out gets, and what is made of it."""
        if self.evidence.error[row] <= MOST_ASSUMED:
            return
        noisy = self.rule[row] in (CANCELLED_GRADIENT, CANCELLED_ERROR, CANCELLED_SUM, CANCELS_INSIDE)
        if noisy or JudgedPair(self.evidence, row, sources, 0.0).cancels:
            self._cancelling.add(row)
            return
        kinds = self.structure.kind
        gradients = [source for source in sources if kinds[source] in GRADIENT_KINDS]
        made = kinds[row] in (*GRADIENT_KINDS, "step_grad")
        if made and gradients and self._cancelling.issuperset(gradients):
            self._cancelling.add(row)

    def _explain_by_conditioning(self, row: int, sources: Sequence[int]) -> str:
        if row in self.pairs.other_gelus or row in self.ties.mistaken or row in self.pairs.masks:
            return ""
        pair, error = JudgedPair(self.evidence, row, sources, 0.0), self.evidence.error[row]
        return explain_by_conditioning(pair, error) or explain_by_unseen_code(pair, error)

    def _doubt(self, row: int, sources: Sequence[int]) -> str:
        """Return why a pair beyond its tolerance may still be right; empty if it is wrong."""
        if row in self.pairs.other_gelus:
            return ""
        pair, error = JudgedPair(self.evidence, row, sources, 0.0), self.evidence.error[row]
        return doubt_rounding(pair, error) or doubt_unseen_code(pair, error)

    def _blame_mask(self, mask: int) -> None:
        """Call an ambiguous mask wrong, because something made from it is."""
        tensors = self.structure.tensor
        same = [row for row in self._ambiguous if tensors[row] == tensors[mask]]
        if self.status[mask] == "unjudged":
            self.born.append(min(same))
            self.sources_error[min(same)] = 0.0
        for row in same:
            self.status[row] = "diverged"

    def _copy_judgement(self, row: int, first: int) -> None:
        """Judge a record of the very same two tensors as the first one."""
        self.status[row], self.tolerance[row] = self.status[first], self.tolerance[first]
        self.rule[row], self.evidence.wrong[row] = self.rule[first], self.evidence.wrong[first]
        self.wrong_so_far.gradients += self.evidence.wrong[row] and self.structure.kind[row] == "param_grad"
        if self.ties:
            self.ties.copy(row, first)

    def _substitute_source(self, row: int, sources: Sequence[int]) -> list[int]:
        """Return the worst right output before a record whose inputs were not recorded: they may be as far off."""
        kinds = self.structure.kind
        outside = kinds[row] in ("param", "buffer", "step_grad") or (
            kinds[row] == "input" and not self.structure.module[row]
        )
        if outside or self.pairs.isolated is not None or any(kinds[source] in _FLOWING for source in sources):
            return []
        worst = self.worst_outputs.before(row)
        return [] if worst is None else [worst]

    def _calls_that_lack_a_gradient(self, row: int) -> list[Spot]:
        """Return the calls whose backward made a gradient without one that the reference has: at an output; or, of
        the calls inside a container, and of those that use an output, at an input."""
        kind = self.structure.kind[row]
        if kind not in GRADIENT_KINDS or not (self.calls_without_gradient or self.calls_that_send_none):
            return []
        made_in = self.structure.made_in(row)
        found = [call.spot for call in made_in if call.spot in self.calls_without_gradient]
        if kind in _FLOWING_GRADIENTS:
            own = self.structure.call_of(row)
            others = [call.spot for call in made_in if call is not own]
            found += [spot for spot in others if spot in self.calls_that_send_none]
        return found


def _is_nearly(error: float, other: float) -> bool:
    return error == other or abs(error - other) <= 1e-3 * other < float("inf")


def are_nearly(errors: Floats, others: Floats) -> npt.NDArray[np.bool_]:
    """Return `_is_nearly` in columns."""
    with np.errstate(invalid="ignore", over="ignore"):
        near = (np.abs(errors - others) <= 1e-3 * others) & (1e-3 * others < np.inf)
    return np.asarray((errors == others) | near)
