"""Compares two modules operator by operator on the same inputs."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensortap.core.operators import Operator
from tensortap.errors import TensortapError, UsageError
from tensortap.frameworks import framework_of
from tensortap.frameworks.base import Framework
from tensortap.frameworks.operators import tracer_of
from tensortap.zoom.finding import Expand, OperatorFinding, Side, find_cut, find_difference, find_rounding, find_uncut
from tensortap.zoom.matching import Matches, Values, match_values, tolerance
from tensortap.zoom.result import OperatorRow, Zoom
from tensortap.zoom.rows import align_operators
from tensortap.zoom.tracing import Call, TracedCall, trace_call, trace_exactly
from tensortap.zoom.wording import describe, describe_match

__all__ = ["zoom_modules"]

_CLOSE = 1e-5
"""Relative difference up to which gradients of the framework's own backward are right if the outputs are."""
_CERTAIN = 1e-2
"""Relative difference above which a gradient is wrong, and needs no float64 to tell."""


def zoom_modules(reference: Any, candidate: Any, call: Call, name: str = "", exact: bool = True) -> Zoom:
    """Trace both modules and return the first difference; see `tensortap.zoom`."""
    framework = framework_of(reference)
    if framework_of(candidate).name != framework.name:
        raise UsageError("zoom compares two modules of one framework; these are of two")
    plain = _Pair(framework, reference, candidate, call)
    notes = [*plain.missing()]
    if plain.equal():
        return plain.result("match", None, describe_match(True, 0.0, plain.count()), notes, name)
    finding = None
    try:
        if exact:
            finding = _find_exactly(plain, _Pair(framework, reference, candidate, call, True))
    except (TensortapError, TypeError, RuntimeError, ValueError) as error:
        notes.append(f"not checked in float64, so small mistakes may pass as rounding: {error}")
        exact = False
    if finding is None:
        finding = plain.rounding() if exact else plain.first() or plain.rounding()
    if finding is None:
        return plain.result("match", None, describe_match(False, plain.worst(), plain.count()), notes, name)
    verdict = "imprecise" if finding.kind == "rounding" else "diverged"
    return plain.result(verdict, finding, describe(finding), notes, name)


def _find_exactly(plain: _Pair, exact: _Pair) -> OperatorFinding | None:
    """Return the first mistake that float64 shows.

    Backwards that the plain traces have settled do not run again in float64: a backward takes most of the time.
    """
    if (finding := exact.first_in_forward()) is not None:
        return finding
    if (finding := plain.failed_backward()) is not None:
        return finding
    if plain.has_right_gradients():
        return None
    wrong = plain.wrong_gradients()
    if plain.worst_gradient() > _CERTAIN and (finding := exact.cut(wrong)) is not None:
        return finding
    if wrong and (finding := exact.first_in_backward(plain.first_of(wrong))) is not None:
        return finding
    return exact.first_in_backward(None)


@dataclass(frozen=True)
class _Leaving:
    """A value that leaves the call on both sides: an output, or the gradient of an input or parameter."""

    name: str
    candidate: int | None
    reference: int | None


class _Pair:
    """Both traces of one call, and the values they share."""

    def __init__(
        self,
        framework: Framework,
        reference: Any,
        candidate: Any,
        call: Call,
        exact: bool = False,
    ) -> None:
        """Trace both modules; in float64, only forward."""
        self._framework, self._exact = framework, exact
        run = trace_exactly if exact else trace_call
        self._theirs = run(framework, reference, call, "reference")
        self._ours = run(framework, candidate, call, "candidate")
        self._their_values = Values(self._theirs.trace, framework.host)
        self._our_values = Values(self._ours.trace, framework.host)
        self._matches = Matches()
        self._matched = 0, 0
        """Numbers of matched values of the candidate and of the reference."""

    @property
    def matches(self) -> Matches:
        """The values that both sides have, among all values so far."""
        before = self._matched
        self._matched = now = len(self._ours.trace.values), len(self._theirs.trace.values)
        for ours, theirs in (
            (range(before[0], now[0]), range(now[1])),
            (range(before[0]), range(before[1], now[1])),
        ):
            if ours and theirs:
                match_values(self._our_values, self._their_values, self._exact, self._matches, ours, theirs)
        return self._matches

    def count(self) -> int:
        return len(self._ours.trace.operators)

    def missing(self) -> list[str]:
        """Return notes on outputs and gradients that only one side has."""
        notes = [
            f"the backward of the {side} failed: {call.failure}"
            for side, call in (("reference", self._theirs), ("candidate", self._ours))
            if call.failure
        ]
        for what, ours, theirs in (
            ("output", self._ours.outputs, self._theirs.outputs),
            ("gradient of", self._ours.gradients, self._theirs.gradients),
        ):
            for side, one, other in (("candidate", ours, theirs), ("reference", theirs, ours)):
                only = [name for name in one if name not in other]
                if only:
                    notes.append(f"only the {side} has {what} {', '.join(only)}")
        return notes

    def _outputs(self) -> list[_Leaving]:
        return _both("output", self._ours.outputs, self._theirs.outputs)

    def _gradients(self) -> list[_Leaving]:
        return _both("gradient of", self._ours.gradients, self._theirs.gradients)

    def equal(self) -> bool:
        """Whether all values that leave the call are equal bit for bit."""
        return bool(self._ours.failure) == bool(self._theirs.failure) and all(
            each.candidate is not None
            and each.reference is not None
            and self._our_values.equal(each.candidate, self._their_values, each.reference)
            for each in (*self._outputs(), *self._gradients())
            if not (each.candidate is None and each.reference is None)
        )

    def _distance(self, each: _Leaving) -> float:
        if each.candidate is None or each.reference is None:
            return 0.0 if each.candidate is each.reference else float("inf")
        return self._our_values.floored_distance(each.candidate, self._their_values, each.reference)

    def worst(self) -> float:
        return max(map(self._distance, (*self._outputs(), *self._gradients())), default=0.0)

    def first(self) -> OperatorFinding | None:
        """Return the first mistake: of the forward if an output is wrong, else of the backward."""
        return self.first_in_forward() or self.failed_backward() or self._wrong_backward()

    def first_in_forward(self) -> OperatorFinding | None:
        wrong = [each for each in self._outputs() if self._is_wrong(each)]
        return self._difference(wrong, "forward") if wrong else None

    def failed_backward(self) -> OperatorFinding | None:
        if not self._ours.failure or self._theirs.failure:
            return None
        return OperatorFinding("failed", "backward", None, None, None, None, self._ours.failure)

    def first_in_backward(self, names: Container[str] | None) -> OperatorFinding | None:
        """Run the backward for these inputs and parameters, or for all, and return the first mistake."""
        for traced, values in ((self._theirs, self._their_values), (self._ours, self._our_values)):
            before = len(traced.trace.operators)
            traced.run_backward(names)
            if any(operator.writes for operator in traced.trace.operators[before:]):
                values.forget()
        return self._wrong_backward()

    def _wrong_backward(self) -> OperatorFinding | None:
        wrong = [each for each in self._gradients() if self._is_wrong(each)]
        if not wrong:
            return None
        if (finding := self.cut([_source_of(each) for each in wrong])) is not None:
            return finding
        return self._difference([each for each in wrong if each.candidate is not None] or wrong, "backward")

    def cut(self, names: Sequence[str]) -> OperatorFinding | None:
        """Return the operator at which the candidate cuts these gradients off, or passes one that the reference cuts
        off.
        """
        return find_cut(*self._sides(), names) or find_uncut(*self._sides(), names)

    def wrong_gradients(self) -> list[str]:
        """Return the inputs and parameters whose gradients differ by more than rounding."""
        return [_source_of(each) for each in self._gradients() if self._is_wrong(each)]

    def worst_gradient(self) -> float:
        return max(map(self._distance, self._gradients()), default=0.0)

    def has_right_gradients(self) -> bool:
        """Whether gradients agree closely and all backward code is the framework's own.

        If outputs are equal in float64, the backward of the framework's operators then is right, too. A Function of
        a user may be wrong by less.
        """
        functions = any(
            operator.is_function for side in (self._ours, self._theirs) for operator in side.trace.operators
        )
        return not functions and not self._theirs.failure and self.worst_gradient() <= _CLOSE

    def first_of(self, names: Sequence[str]) -> Container[str]:
        """Return the one of these whose gradient is computed first, so that its backward is the shortest."""
        made = {
            name: number
            for name in names
            if (value := self._ours.gradients.get(name)) is not None
            and (number := self._ours.trace.values[value].producer) is not None
        }
        return {min(made, key=lambda name: made[name])} if made else names

    def _is_wrong(self, each: _Leaving) -> bool:
        if each.candidate is None or each.reference is None:
            return each.candidate is not each.reference
        ours, theirs = self._ours.trace.values[each.candidate], self._theirs.trace.values[each.reference]
        if ours.shape != theirs.shape:
            return True
        allowed = tolerance(ours, theirs, self._exact) * (1 if self._exact else 8)
        return not self._distance(each) <= allowed

    def _difference(self, wrong: Sequence[_Leaving], phase: str) -> OperatorFinding:
        candidate, reference = self._sides()
        pairs = [
            (each.name, each.candidate, each.reference)
            for each in wrong
            if each.candidate is not None and each.reference is not None
        ]
        if not pairs:
            missing = wrong[0]
            return OperatorFinding("detached", phase, None, None, None, None, missing.name)
        return find_difference(candidate, reference, pairs, Expand(self._parts), phase)

    def _parts(self, operator: Operator) -> Sequence[Sequence[Operator]]:
        """Expand a fused operator of the reference, and match its parts."""
        ways = tracer_of(self._framework).expand(self._theirs.trace, operator)
        _ = self.matches  # those of the parts join the others
        return ways

    def _sides(self) -> tuple[Side, Side]:
        matches = self.matches
        return (
            Side(self._ours, self._our_values, matches.candidate),
            Side(self._theirs, self._their_values, matches.reference),
        )

    def rounding(self) -> OperatorFinding | None:
        """Return the first operator that computes in a coarser dtype than the reference's."""
        rows = align_operators(self._theirs.trace, self._ours.trace, self.matches.candidate)
        return find_rounding(*self._sides(), rows)

    def result(
        self, verdict: Any, finding: OperatorFinding | None, sentence: str, notes: Sequence[str], name: str
    ) -> Zoom:
        rows = align_operators(self._theirs.trace, self._ours.trace, self.matches.candidate)
        outputs = {each.name: self._distance(each) for each in (*self._outputs(), *self._gradients())}
        return Zoom(verdict, sentence, finding, [self._row(*row) for row in rows], outputs, list(notes), name)

    def _row(self, theirs: Operator | None, ours: Operator | None) -> OperatorRow:
        dtypes = _dtype(self._theirs, theirs), _dtype(self._ours, ours)
        if theirs is None or ours is None:
            return OperatorRow(
                theirs, ours, f"{'candidate' if theirs is None else 'reference'} only", float("nan"), *dtypes
            )
        mine, their = ours.outputs[0], theirs.outputs[0]
        if self._our_values.equal(mine, self._their_values, their):
            return OperatorRow(theirs, ours, "equal", 0.0, *dtypes)
        rel_l2 = self._our_values.distance(mine, self._their_values, their)
        close = their in self.matches.candidate.get(mine, ())
        return OperatorRow(theirs, ours, "close" if close else "differs", rel_l2, *dtypes)


def _source_of(gradient: _Leaving) -> str:
    return gradient.name.removeprefix("gradient of ")


def _dtype(call: TracedCall, operator: Operator | None) -> str:
    if operator is None or not operator.outputs:
        return ""
    return call.trace.values[operator.outputs[0]].dtype


def _both(what: str, ours: Mapping[str, int | None], theirs: Mapping[str, int | None]) -> list[_Leaving]:
    return [_Leaving(f"{what} {name}", ours[name], theirs[name]) for name in theirs if name in ours]
