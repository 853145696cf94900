"""Tolerance rules: how much difference each pair is allowed, and why.

`RULES` lists them in order. Each has a name, which reports show, a condition and an amount. The judge allows a pair the
largest amount of all rules that apply; of equal amounts, the first rule's. `by_design` has the rules for differences
between frameworks: they raise the rounding that a pair starts from.

Some rules assume an error that nothing measured: the rounding of a dtype, or how errors add up. Such a rule allows at
most `MOST_ASSUMED`, unless the pair is a sum that cancels out. A sum cancels out if it is smaller than its terms are
together, even if their signs were random.

A new rule is one entry of `RULES`. `rounding` has the constants of dtypes, rows and measured noise; `evidence` has
what a rule can ask about a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.pairs import Floats
from tensortap.compare.judge.rules import columns, optimizer_columns
from tensortap.compare.judge.rules.columns import PairColumns
from tensortap.compare.judge.rules.conditions import KindIs, is_of
from tensortap.compare.judge.rules.evidence import JudgedPair
from tensortap.compare.judge.rules.margins import (
    CANCELLED,
    ENLARGED,
    FLIPPED,
    FLIPPED_MAPPED,
    FLIPPED_UNEVEN,
    MAGNIFIED,
    MOST_ASSUMED,
    MOST_CANCELLED,
    NEGLIGIBLE,
    ORTHOGONAL_FLOOR,
    ORTHOGONALIZED,
    PARTLY_CANCELS,
    ROUNDED_APART,
    SHARE_ROUNDED_APART,
    SHORT,
    SYSTEMATIC,
)
from tensortap.compare.judge.rules.rounding import EPSILON
from tensortap.core.records import GRADIENT_KINDS

__all__ = [
    "CANCELLED_GRADIENT",
    "FEW_STEPS",
    "KINK",
    "MOST_ASSUMED",
    "MOST_CAME_IN",
    "MOVED_TIES",
    "NAIVE_SUM",
    "OTHER_GELU",
    "ROUNDING",
    "ROUNDING_ALONE",
    "ROUNDING_INSIDE",
    "RULES",
    "SAME_MASK",
    "UNSEEN_PARAMETERS",
    "UNSEEN_USE",
    "Rule",
    "Tolerance",
    "Tolerances",
    "find_tolerance",
    "find_tolerances",
    "is_doubtful_rounding",
    "is_doubtful_sum",
    "is_drowned",
]

ROUNDING = "rounding of its dtype"
SAME_MASK = "a mask: hides the same elements"
KINK = "few elements crossed a kink"
FEW_STEPS = "few elements, whose gradient is nearly zero, took another step"
ROUNDING_ALONE = "rounding of what it sums"
CANCELLED_GRADIENT = "rounding of what cancels out in it"
NAIVE_SUM = "a sum of many short numbers, which is this far off if it is rounded after each of them"
ROUNDING_INSIDE = "the code computes in a short dtype, and numbers that cancel out or large scores magnify rounding"
MOVED_TIES = "rounding moved ties of a maximum, and neighbours share the gradients of these"
OTHER_GELU = "one side computes GELU by erf, the other one its approximation by tanh"
MOST_CAME_IN = "so much error came in that a mistake would not show"
UNSEEN_USE = "one side runs inside a graph, where the model reads this output itself, unseen"
UNSEEN_PARAMETERS = "earlier gradients' noise in parameters that were not recorded"
_CAME_IN, _ACTIVATIONS = "error that came in", "error of the activations"
_AS_GIVEN = "rtol and atol as given"
_FLOWING = ("input", "output", "grad_output", "grad_input")
_MOST_DOUBTED = 1 / 3
"""The largest relative error of a sum of short numbers that is left unjudged. Half of a batch is more; so is
a factor of 1.2, which counts double along the tensor."""
_ROUNDINGS_OF_LONG = 16.0
"""Epsilons in the rounding of a long dtype."""
_FEW_ROUNDINGS = 4.0
"""Epsilons by which a module that calls no others may magnify its roundings."""
_RUNS_OF_ONE_SIGN = 2.0
"""Size of a sum over that of one with random signs, from which on its terms come in runs of one sign."""


@dataclass(frozen=True)
class Rule:
    """A reason why a pair may differ."""

    name: str
    applies: Callable[[JudgedPair], bool]
    amount: Callable[[JudgedPair], float]
    """The relative error that it allows."""
    for_unrecorded: bool = False
    """Whether it allows for something that was not recorded, and by far more than if it were. A match that needs it is
    none: the records do not show whether the difference is noise or a mistake."""
    in_columns: Callable[[PairColumns], Floats] | None = None
    """The amount for many pairs at once, 0 where it does not apply. Without it, pairs are judged one by one."""


class Tolerance(NamedTuple):
    """The relative error that a pair is allowed."""

    allowed: float
    rule: str
    """The name of the rule that allows it."""
    recorded: float
    """The error allowed without the rules for unrecorded values."""


def find_tolerance(pair: JudgedPair) -> Tolerance:
    if pair.row in pair.evidence.pairs.masks:
        return Tolerance(0.0, SAME_MASK, 0.0)
    if pair.policy.fixed:
        fixed = pair.policy.fixed_tolerance(pair.l2, int(pair.evidence.pairs.elements[pair.row]))
        return Tolerance(fixed, _AS_GIVEN, fixed)
    kind, allowed, name = pair.kind, pair.base, ROUNDING
    if kind == "param" and pair.evidence.pairs.is_set_differently(pair.row):  # it need not be noise of gradients
        allowed = max(allowed, pair.policy.passed_on(pair.incoming_state))
        return Tolerance(allowed, name, allowed)
    recorded = allowed
    for rule, is_certain in _rules_of(RULES, kind):
        if is_certain or rule.applies(pair):
            amount = rule.amount(pair)
            if amount > allowed:
                allowed, name = amount, rule.name
            if amount > recorded and not rule.for_unrecorded:
                recorded = amount
    return Tolerance(allowed, name, recorded)


class Tolerances(NamedTuple):
    """The tolerances of many pairs, see `Tolerance`."""

    allowed: Floats
    rules: npt.NDArray[np.int64]
    """The rule of each pair, as a number in `names`."""
    names: list[str]
    recorded: Floats


def find_tolerances(pairs: PairColumns) -> Tolerances | None:
    """Return the tolerances of pairs whose sources are all right; None if they must be judged one by one."""
    rules = [rule for rule, _ in _rules_of(RULES, pairs.kind)]
    if not all(rule.in_columns for rule in rules):
        return None
    allowed, recorded = pairs.base.copy(), pairs.base.copy()
    found = np.zeros(len(allowed), np.int64)
    for number, rule in enumerate(rules, 1):
        if rule.in_columns is None:
            continue
        amount = rule.in_columns(pairs)
        more = amount > allowed
        allowed[more], found[more] = amount[more], number
        if not rule.for_unrecorded:
            recorded = np.where(amount > recorded, amount, recorded)
    return Tolerances(allowed, found, [ROUNDING, *(rule.name for rule in rules)], recorded)


class _Rules(NamedTuple):
    """All rules, and those of each kind of records, with whether the kind alone decides that they apply."""

    every: tuple[Rule, ...]
    of_kind: dict[str, tuple[tuple[Rule, bool], ...]]


_sorted_rules = _Rules((), {})


def _rules_of(every: tuple[Rule, ...], kind: str) -> tuple[tuple[Rule, bool], ...]:
    """Return the rules that may apply to a kind of records. Each pair asks, so the answers are kept."""
    global _sorted_rules
    if _sorted_rules.every is not every:
        _sorted_rules = _Rules(every, {})
    if kind not in _sorted_rules.of_kind:
        found = []
        for rule in every:
            by_kind = rule.applies if isinstance(rule.applies, KindIs) else None
            if by_kind is None or kind in by_kind.kinds:
                found.append((rule, by_kind is not None and by_kind.further is None))
        _sorted_rules.of_kind[kind] = tuple(found)
    return _sorted_rules.of_kind[kind]


def is_drowned(kind: str, rule: str, error: float) -> bool:
    """Whether a pair is right only as far as the errors before it explain, and these are so large that it says nothing.

    Parameters are not meant: an optimizer turns the noise of a small gradient into a whole step.
    """
    return error > MOST_ASSUMED and rule in (_CAME_IN, _ACTIVATIONS) and kind not in ("param", "buffer")


def _measured_noise(pair: JudgedPair) -> float:
    return 0.0 if pair.policy.noise is None else float(pair.policy.noise[pair.row])


def _rounding_of_sources(pair: JudgedPair) -> float:
    """Rounding that comes in unseen: with values that were cast; or where short numbers are processed and the result
    is kept in long ones, like gradients and running statistics."""
    isolated, evidence = pair.evidence.pairs.isolated, pair.evidence
    if isolated is None:  # what comes in was measured; what the code between modules rounds was not
        return _short_rounding(pair) if evidence.mixed_rounding and pair.is_made_by_container else 0.0
    kinds = evidence.structure.kind
    kept = pair.kind in GRADIENT_KINDS or pair.kind == "buffer"
    coarse = [evidence.base[s] for s in pair.sources if isolated.cast[s] or (kept and kinds[s] in _FLOWING)]
    longer = pair.policy.lengthening(pair.kind)
    if pair.kind == "param_grad" and pair.is_vector:
        longer = max(longer, _roundings_of_partial_sums(pair))
    return _assumed(pair, max((*coarse, longer * _short_rounding(pair))))


def _few_rounded_apart(pair: JudgedPair) -> float:
    """The own code of a container may compute in a short dtype, as under autocast, and keep the result in a long one.
    Of right code, any few elements may be rounded to the other side, by half an epsilon each."""
    elements = max(1, int(pair.evidence.pairs.elements[pair.row]))
    share = max(ROUNDED_APART / elements, SHARE_ROUNDED_APART)
    return float(pair.evidence.short_rounding / 2 * min(1.0, share) ** 0.5)


def _short_rounding(pair: JudgedPair) -> float:
    """Return the rounding of the coarsest dtype in which the code computes that made a pair; 0 if it is not short.

    A module's records show it. The own code of a container, or of a module with a matrix, may compute in a short dtype
    and return none of it, so it counts as mixed if anything in the model is.
    """
    evidence = pair.evidence
    if not evidence.mixed_rounding:
        return 0.0
    if pair.is_made_by_container or (evidence.pairs.isolated is not None and pair.has_matrix):
        return evidence.mixed_rounding
    mixed = evidence.pairs.mixed
    return max((evidence.base[row] for row in pair.rows_of_its_code if mixed[row]), default=0.0)


def is_doubtful_rounding(pair: JudgedPair, error: float) -> bool:
    """Whether a pair is off by more than is allowed, and rounding inside its code may be the reason.

    Only measured noise shows how far the code magnifies it. A module that calls no others magnifies it little. The
    gradient of values that cancel out is as rough as the gradient that came in.
    """
    rounding, isolated = _short_rounding(pair), pair.evidence.pairs.isolated is not None
    if not rounding >= SHORT or pair.policy.fixed or pair.policy.noise is not None:
        return False
    if pair.kind in ("grad_output", "grad_input") and pair.l2 > 0:
        given = max((pair.evidence.l2[source] for source in pair.sources_of(*GRADIENT_KINDS)), default=0.0)
        if error <= CANCELLED * rounding * given / pair.l2 and (isolated or pair.is_made_by_container):
            return True
    if not isolated:  # what comes in was measured
        return False
    if pair.l2 > 0:  # a row may be off by much more than the whole, where it is magnified
        error = min(error, float(pair.evidence.pairs.distance[pair.row]) / pair.l2)
    # Code that uses the parameters of a module and does not call it is a container's.
    structure = pair.evidence.structure
    users = structure.users_of_own(pair.row) if pair.kind == "param_grad" else []
    by_container = pair.is_made_by_container or any(call.module != structure.module[pair.row] for call in users)
    # The gradient of one input is made from differences of another one, as that of points at which it is sampled.
    call = structure.call_of(pair.row) if pair.kind == "grad_input" else None
    of_several = call is not None and len(call.of("grad_input")) > 1
    return error <= (MOST_ASSUMED if by_container or of_several else _FEW_ROUNDINGS * rounding)


def _roundings_of_partial_sums(pair: JudgedPair) -> float:
    """Return how many epsilons a sum of n terms is off if each partial sum is rounded to the coarser dtype.

    Each rounding moves a partial sum by at most half an epsilon of itself. If signs are random, partial sums grow as
    sqrt(k) and roundings are independent: together they are sqrt(n / 8) of the norm of the terms. If all terms have
    one sign, partial sums grow as k, and many small terms are lost in the same direction: up to n / 4 of the result.
    The size of the sum shows how many terms have its sign.
    """
    n, terms = pair.summands, pair.terms
    if not (pair.l2 > 0 and terms > 0 and n > 0):
        return 0.0
    of_one_sign = min(1.0, pair.l2 / (n**0.5 * terms))
    return float(max((n / 8) ** 0.5 * max(1.0, terms / pair.l2), of_one_sign * n / 4))


def _roundings_of_runs(pair: JudgedPair) -> float:
    """Return how many epsilons a sum of n terms is off that come in runs of one sign, such as the positions of an
    image under a mean. Partial sums are then as large as the whole for most of the time, though runs cancel out."""
    n, terms = pair.summands, pair.terms
    if not (pair.l2 > 0 and terms > 0 and n > 0):
        return 0.0
    if pair.policy.noise is not None and pair.l2 < _RUNS_OF_ONE_SIGN * terms:
        return 0.0  # runs may cancel each other, but then measured noise shows it
    return n / 4 * max(1.0, terms / pair.l2)


def is_doubtful_sum(pair: JudgedPair, error: float) -> bool:
    """Whether a sum of short numbers is off by more than is allowed, and a naive sum of them may be.

    Partial sums are as large as the norm of the terms, however small the whole is.
    """
    if pair.kind != "param_grad" or not pair.is_vector or pair.policy.fixed:
        return False
    partial = pair.terms if pair.terms > PARTLY_CANCELS * pair.l2 else pair.l2
    if error * pair.l2 > _MOST_DOUBTED * partial:
        return False
    evidence = pair.evidence
    rounding = max((evidence.base[source] for source in pair.sources_of("grad_output")), default=0.0)
    return rounding >= SHORT and error <= rounding * max(_roundings_of_partial_sums(pair), _roundings_of_runs(pair))


def _assumed(pair: JudgedPair, amount: float) -> float:
    """Limit what a rule allows that no measured error backs."""
    return amount if pair.cancels else min(amount, MOST_ASSUMED)


def _rounding_of_mean(pair: JudgedPair) -> float:
    """A running mean is an average of numbers that may cancel out: it is off by an epsilon of their size.
    That may be one of a short dtype."""
    evidence, elements = pair.evidence, pair.evidence.pairs.elements
    sizes = [evidence.l2[source] / max(1, int(elements[source])) ** 0.5 for source in pair.sources_of("input")]
    if not pair.is_vector or not sizes or not pair.l2 > 0:
        return 0.0
    size = max(sizes) * int(elements[pair.row]) ** 0.5
    given = [evidence.base[source] for source in pair.sources_of("input")]
    short = max((base for base in given if base >= SHORT), default=0.0)
    # One epsilon of a long dtype is rounding, however little is left: a mean may be zero in theory, as after a norm.
    return float(max(pair.base / _ROUNDINGS_OF_LONG * size / pair.l2, min(MOST_ASSUMED, short * size / pair.l2)))


def _error_of_averaged(pair: JudgedPair) -> float:
    """A mean is off by no more than the root mean square of what the numbers that it averages are off by. If these
    cancel out, that is much in relation to the mean."""
    evidence, elements = pair.evidence, pair.evidence.pairs.elements
    if not pair.is_vector or not pair.l2 > 0:
        return 0.0
    given = [source for source in pair.sources_of("input") if not evidence.wrong[source]]
    off = [float(evidence.distance[source]) / max(1, int(elements[source])) ** 0.5 for source in given]
    worst = max((each for each in off if each < float("inf")), default=0.0)
    return float(ENLARGED * worst * int(elements[pair.row]) ** 0.5 / pair.l2)


def _error_of_activations(pair: JudgedPair) -> float:
    """Where an activation crosses a kink, as in a ReLU or a maximum, its gradient jumps. With activations that are off
    by e, about a share of e of them does, which moves the gradient by the root of it. If one side includes activations
    in other modules, the gradients before them are not known: what they move adds up in squares."""
    evidence = pair.evidence
    errors = [evidence.propagated[source] for source in pair.right_activations if evidence.is_known(source)]
    return float(evidence.pairs.unseen_kinks * max(errors, default=0.0) ** 0.5)


def _absolute_error(pair: JudgedPair) -> float:
    """A module without parameters, such as a ReLU, hardly enlarges numbers: what it returns is off by no more than what
    it got. If it drops most of that, the error is large against the rest."""
    evidence = pair.evidence
    kinds = ("input",) if pair.kind == "output" else ("grad_output",)
    given = [source for source in pair.sources_of(*kinds) if not evidence.wrong[source]]
    distance = max((float(evidence.pairs.distance[source]) for source in given), default=0.0)
    if not pair.l2 > 0 or not distance < float("inf") or pair.has_parameters or pair.is_made_by_container:
        return 0.0
    return min(MOST_ASSUMED, ENLARGED * distance / pair.l2)


def _rounding_of_activations(pair: JudgedPair) -> float:
    """A product of short numbers is rounded to their dtype, also if it is kept in a longer one. Under autocast, the
    gradient at the output may be short where the input is not."""
    factors = pair.right_activations + pair.sources_of("grad_output")
    return max((pair.evidence.base[source] for source in factors), default=0.0) / 8


def _rounding_of_cancelled_gradient(pair: JudgedPair) -> float:
    """A gradient that is sent back may cancel out, as from a norm under a loss that ignores the scale, or to a query
    that a softmax ignores. Its rounding is as large as that of the gradient that came in. It may be zero in theory, as
    under a softmax over equal values: then nothing else is left. The gradient of a single number, such as a loss, has
    another size than what is made from it, and cancels nothing."""
    elements = pair.evidence.pairs.elements
    sources = [source for source in pair.sources_of(*GRADIENT_KINDS) if elements[source] > 1]
    given = max((pair.evidence.l2[source] for source in sources), default=0.0)
    times = CANCELLED * given / pair.l2 if 0 < CANCELLED * pair.l2 < given else 0.0
    if not pair.policy.mapped and not pair.l2 < NEGLIGIBLE * given:
        times = min(times, MOST_CANCELLED)
    return times * pair.base


def _rounding_of_sum(pair: JudgedPair) -> float:
    evidence = pair.evidence
    rounding = evidence.summed.rounding(pair.row, pair.sources, evidence.error, evidence.wrong)
    if pair.l2 > 0:
        return _assumed(pair, rounding / pair.l2)
    return float("inf") if not pair.l2 and evidence.pairs.distance[pair.row] <= rounding else 0.0


def _rounding_of_sum_over_step(pair: JudgedPair) -> float:
    """If the micro batches of a step are not comparable, nothing shows how much error came in: gradients of other
    batches are made by other sums in each layer, and then summed in another order."""
    if not pair.l2 > 0:
        return 0.0
    lengthened = pair.base * (pair.policy.lengthening("param_grad") if pair.base < SHORT else 1.0)
    if not pair.is_vector:
        return lengthened
    return max(
        lengthened, _assumed(pair, pair.evidence.summed.rounding_over_step(pair.row, pair.evidence.error) / pair.l2)
    )


def _systematic_error(pair: JudgedPair) -> float:
    """After an optimizer's step errors are alike at all positions: in a sum they add up, instead of averaging out.

    By Cauchy and Schwarz, a sum of n terms is off by at most sqrt(n) times the norm of their errors.
    """
    if not pair.l2 > 0:
        return 0.0
    return _assumed(pair, SYSTEMATIC * pair.incoming * pair.summands**0.5 * pair.terms / pair.l2)


def _magnified_noise(pair: JudgedPair) -> float:
    """Adam divides a gradient by its own size: where it is nearly zero, its noise decides the step's sign."""
    evidence = pair.evidence
    if any(evidence.wrong[source] for source in pair.sources):
        return 0.0
    noise = evidence.optimizer.noise(pair.row, pair.sources)
    share = _noise_of_vector(pair, noise) if pair.is_vector else min(1.0, _noise_of_matrix(pair, noise))
    if evidence.pairs.is_orthogonalized(pair.row):
        share = max(share, _noise_of_orthogonal_step(pair))
    if not pair.sources_of("step_grad"):  # they may have been clipped, and all of them by another norm
        share = max(share, min(1.0, 2 * evidence.optimizer.error_of_norms(pair.row)))
    return share * evidence.step_size(pair.row)


def _noise_of_matrix(pair: JudgedPair, noise: float) -> float:
    """About a share of the noise of a gradient's elements has a sign that it decides. Where many elements are nearly
    zero, more have. Their elements show how many, if they are known; else the sum of their magnitudes."""
    evidence = pair.evidence
    if pair.policy.mapped:
        return float(FLIPPED_MAPPED * noise**0.5)  # other kernels have other zeros
    gradients, step = evidence.optimizer.so_far(pair.row), evidence.structure.scope[pair.row][1]
    share = gradients.worst_share(step)
    if pair.sources_of("step_grad", "param_grad") and share is not None:
        return float(max(2 * noise**0.5, MAGNIFIED * share))
    return float((FLIPPED_UNEVEN if gradients.are_uneven(step) else FLIPPED) * noise**0.5)


def _noise_of_orthogonal_step(pair: JudgedPair) -> float:
    """Some optimizers multiply all singular values of a gradient, or of its moment, until they are about 1. They do so
    in bfloat16, so that any noise which rounds an element to the other side grows with the small ones. So does that of
    other kernels, if the gradients are equal."""
    evidence = pair.evidence
    noise = evidence.optimizer.so_far(pair.row).worst_error(evidence.structure.scope[pair.row][1])
    return float(min(2.0, max(ORTHOGONAL_FLOOR, ORTHOGONALIZED * (EPSILON["bfloat16"] * noise) ** 0.5)))


def _noise_of_vector(pair: JudgedPair, noise: float) -> float:
    """Part of a vector may be zero in theory, as the keys' part of a bias: any noise may flip it. If the elements of
    its gradients are known, so far, they show how many have a sign that noise decides."""
    evidence = pair.evidence
    share = evidence.optimizer.so_far(pair.row).worst_share(evidence.structure.scope[pair.row][1])
    if not pair.sources_of("step_grad", "param_grad") or share is None:
        return 2.0 * bool(noise)
    return min(2.0, MAGNIFIED * share)


RULES: tuple[Rule, ...] = (
    Rule(
        "measured noise",
        lambda pair: pair.policy.noise is not None,
        _measured_noise,
        in_columns=columns.measured_noise,
    ),
    Rule(
        "rounding of what it was made from",
        lambda pair: True,
        _rounding_of_sources,
        in_columns=columns.rounding_of_sources,
    ),
    Rule(
        "elements that are rounded to the other side inside",
        lambda pair: pair.is_made_by_container and pair.base < SHORT,
        _few_rounded_apart,
        in_columns=columns.few_rounded_apart,
    ),
    Rule(
        "rounding of statistics over all positions",
        is_of("output", "grad_input", further=lambda pair: pair.has_statistics and pair.base < SHORT),
        lambda pair: pair.policy.lengthening("param_grad") * pair.base,
        in_columns=columns.rounding_of_statistics,
    ),
    Rule("rounding of the numbers that it averages", is_of("buffer"), _rounding_of_mean),
    Rule("error of the numbers that it averages", is_of("buffer"), _error_of_averaged),
    Rule(
        "error of parameters before a value that was not recorded",
        is_of("buffer", further=lambda pair: not pair.sources_of("input")),
        lambda pair: min(MOST_ASSUMED, pair.policy.passed_on(pair.evidence.error_of_parameters(pair.row))),
    ),
    Rule(
        _CAME_IN,
        lambda pair: True,
        lambda pair: pair.policy.passed_on(pair.incoming),
        in_columns=columns.came_in,
    ),
    Rule(
        "error that came in, against what is left",
        is_of("output", "grad_input"),
        _absolute_error,
        in_columns=columns.absolute_error,
    ),
    Rule(_ACTIVATIONS, is_of(*GRADIENT_KINDS), _error_of_activations, in_columns=columns.error_of_activations),
    Rule(
        "rounding of the dtype of activations and gradients",
        is_of("param_grad"),
        _rounding_of_activations,
        in_columns=columns.rounding_of_activations,
    ),
    Rule(
        "error of gradients that were not recorded",
        is_of("param_grad"),
        lambda pair: _assumed(pair, pair.evidence.summed.unrecorded_error(pair.row, pair.sources)),
        in_columns=columns.error_of_unrecorded_gradients,
    ),
    Rule(
        CANCELLED_GRADIENT,
        is_of("grad_output", "grad_input"),
        _rounding_of_cancelled_gradient,
        in_columns=columns.rounding_of_cancelled_gradient,
    ),
    Rule(
        "error that came in, alike at all positions that it sums",
        is_of(
            "param_grad",
            further=lambda pair: pair.is_vector and not pair.evidence.structure.is_at_start(pair.row),
        ),
        _systematic_error,
        in_columns=columns.systematic_error,
    ),
    Rule(
        ROUNDING_ALONE,
        is_of("param_grad", further=lambda pair: pair.is_vector),
        _rounding_of_sum,
        in_columns=columns.rounding_of_sum,
    ),
    Rule(
        "rounding of what it sums over the micro batches of a step",
        is_of("step_grad", further=lambda pair: pair.is_of_other_split),
        _rounding_of_sum_over_step,
        in_columns=columns.of_pairs_without_sources(_rounding_of_sum_over_step),
    ),
    Rule(
        "error of the norm by which gradients are clipped",
        is_of("step_grad"),
        lambda pair: min(MOST_ASSUMED, 2 * pair.evidence.optimizer.error_of_norm(pair.row)),
        in_columns=optimizer_columns.error_of_norm,
    ),
    Rule(
        "both sides clip all gradients to the same norm",
        is_of("step_grad"),
        lambda pair: 2 * (pair.evidence.optimizer.error_of_clipping(pair.row) or 0.0),
        in_columns=optimizer_columns.error_of_clipping,
    ),
    Rule(
        "its gradient's noise, as an optimizer magnifies it",
        is_of("param"),
        _magnified_noise,
        in_columns=optimizer_columns.magnified_noise,
    ),
    Rule(
        "error of parameters that it is tied to",
        is_of("output"),
        lambda pair: min(
            MOST_ASSUMED, pair.policy.passed_on(pair.evidence.error_of_tied_parameters(pair.row, pair.sources))
        ),
        in_columns=columns.no_error,
    ),
    Rule(
        UNSEEN_PARAMETERS,
        is_of("output", "input"),
        lambda pair: pair.evidence.noise_of_unrecorded_parameters(pair.row),
        for_unrecorded=True,
        in_columns=columns.noise_of_unrecorded_parameters,
    ),
)
