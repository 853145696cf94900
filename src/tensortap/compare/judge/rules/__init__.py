"""Tolerance rules: how much difference each pair is allowed, and why.

`RULES` lists them in order. Each has a name, which reports show, a condition and an amount. The judge allows a pair the
largest amount of all rules that apply; of equal amounts, the first rule's. `by_design` has the rules for differences
between frameworks: they raise the rounding that a pair starts from.

A new rule is one entry of `RULES`. `rounding` has the constants of dtypes, rows and measured noise; `evidence` has
what a rule can ask about a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensortap.compare.judge.rules.evidence import JudgedPair
from tensortap.core.records import GRADIENT_KINDS

__all__ = ["ROUNDING", "RULES", "UNSEEN_PARAMETERS", "Rule", "find_tolerance"]

ROUNDING = "rounding of its dtype"
UNSEEN_PARAMETERS = "earlier gradients' noise in parameters that were not recorded"
_AS_GIVEN = "rtol and atol as given"
_CANCELLED = 4.0
_MOST_CANCELLED = 16.0
"""Times its own rounding. A gradient may be small for another reason, such as a small factor: then less is allowed."""
_FLOWING = ("input", "output", "grad_output", "grad_input")


@dataclass(frozen=True)
class Rule:
    """A reason why a pair may differ."""

    name: str
    applies: Callable[[JudgedPair], bool]
    amount: Callable[[JudgedPair], float]
    """The relative error that it allows."""


def find_tolerance(pair: JudgedPair) -> tuple[float, str]:
    """Return the relative error that a pair is allowed, and the name of the rule that allows it."""
    if pair.policy.fixed:
        elements = int(pair.evidence.pairs.elements[pair.row])
        return pair.policy.fixed_tolerance(pair.l2, elements), _AS_GIVEN
    allowed, name = pair.base, ROUNDING
    for rule in RULES:
        if rule.applies(pair) and (amount := rule.amount(pair)) > allowed:
            allowed, name = amount, rule.name
    return allowed, name


def _is_of(*kinds: str) -> Callable[[JudgedPair], bool]:
    return lambda pair: pair.kind in kinds


def _measured_noise(pair: JudgedPair) -> float:
    return 0.0 if pair.policy.noise is None else float(pair.policy.noise[pair.row])


def _rounding_of_sources(pair: JudgedPair) -> float:
    """Rounding that comes in unseen: with values that were cast; or where short numbers are processed and the result
    is kept in long ones, like gradients and running statistics."""
    isolated, evidence = pair.evidence.pairs.isolated, pair.evidence
    if isolated is None:
        return 0.0
    kinds = evidence.structure.kind
    kept = pair.kind in GRADIENT_KINDS or pair.kind == "buffer"
    coarse = (evidence.base[s] for s in pair.sources if isolated.cast[s] or (kept and kinds[s] in _FLOWING))
    return max(coarse, default=0.0)


def _error_of_activations(pair: JudgedPair) -> float:
    """Where an activation crosses a kink, as in a ReLU or a maximum, its gradient jumps. With activations that are off
    by e, about a share of e of them does, which moves the gradient by the root of it."""
    evidence = pair.evidence
    errors = (evidence.propagated[source] for source in pair.right_activations if evidence.is_known(source))
    return float(2 * max(errors, default=0.0) ** 0.5)


def _rounding_of_activations(pair: JudgedPair) -> float:
    return max((pair.evidence.base[source] for source in pair.right_activations), default=0.0) / 8


def _rounding_of_cancelled_gradient(pair: JudgedPair) -> float:
    """A gradient that is sent back may cancel out, as from a norm under a loss that ignores the scale, or to a query
    that a softmax ignores. Its rounding is as large as that of the gradient that came in."""
    given = max((pair.evidence.l2[source] for source in pair.sources_of(*GRADIENT_KINDS)), default=0.0)
    times = _CANCELLED * given / pair.l2 if 0 < _CANCELLED * pair.l2 < given else 0.0
    if not pair.policy.mapped:
        times = min(times, _MOST_CANCELLED)
    return times * pair.base


def _rounding_of_sum(pair: JudgedPair) -> float:
    evidence = pair.evidence
    rounding = evidence.summed.rounding(pair.row, pair.sources, evidence.error, evidence.wrong)
    if pair.l2 > 0:
        return rounding / pair.l2
    return float("inf") if not pair.l2 and evidence.pairs.distance[pair.row] <= rounding else 0.0


def _magnified_noise(pair: JudgedPair) -> float:
    """Adam divides a gradient by its own size: where it is nearly zero, its noise decides the step's sign."""
    evidence = pair.evidence
    if any(evidence.wrong[source] for source in pair.sources):
        return 0.0
    noise = evidence.gradient_noise(pair.row, pair.sources)
    flipped = (8 if pair.policy.mapped else 2) * noise**0.5  # other kernels have other zeros
    share = 2.0 * bool(noise) if pair.is_vector else min(1.0, flipped)
    return share * evidence.step_size(pair.row)


RULES: tuple[Rule, ...] = (
    Rule("measured noise", lambda pair: pair.policy.noise is not None, _measured_noise),
    Rule(
        "rounding of what it was made from",
        lambda pair: pair.evidence.pairs.isolated is not None,
        _rounding_of_sources,
    ),
    Rule("error that came in", lambda pair: True, lambda pair: pair.policy.passed_on(pair.incoming)),
    Rule("error of the activations", _is_of(*GRADIENT_KINDS), _error_of_activations),
    Rule("rounding of the activations' dtype", _is_of("param_grad"), _rounding_of_activations),
    Rule(
        "error of gradients that were not recorded",
        _is_of("param_grad"),
        lambda pair: pair.evidence.summed.unrecorded_error(pair.row, pair.sources),
    ),
    Rule("rounding of what cancels out in it", _is_of("grad_output", "grad_input"), _rounding_of_cancelled_gradient),
    Rule("rounding of what it sums", lambda pair: pair.kind == "param_grad" and pair.is_vector, _rounding_of_sum),
    Rule("its gradient's noise, as an optimizer magnifies it", _is_of("param"), _magnified_noise),
    Rule(
        UNSEEN_PARAMETERS,
        _is_of("output", "input"),
        lambda pair: pair.evidence.noise_of_unrecorded_parameters(pair.row),
    ),
)
