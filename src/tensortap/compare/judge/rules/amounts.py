"""Amounts of the tolerance rules, pair by pair: the relative error that a rule allows.

`columns` has the same amounts for many pairs at once, and `optimizer_amounts` those of what an optimizer makes.
"""

from __future__ import annotations

from tensortap.compare.judge.rules.evidence import JudgedPair
from tensortap.compare.judge.rules.margins import (
    CANCELLED,
    ENLARGED,
    MOST_ASSUMED,
    MOST_CANCELLED,
    NEGLIGIBLE,
    ROUNDED_APART,
    SHARE_ROUNDED_APART,
    SHORT,
    SYSTEMATIC,
)
from tensortap.core.records import GRADIENT_KINDS

__all__ = [
    "absolute_error",
    "assumed",
    "error_of_activations",
    "error_of_averaged",
    "few_rounded_apart",
    "measured_noise",
    "rounding_of_activations",
    "rounding_of_cancelled_gradient",
    "rounding_of_mean",
    "rounding_of_sources",
    "rounding_of_sum",
    "rounding_of_sum_over_step",
    "roundings_of_partial_sums",
    "short_rounding",
    "systematic_error",
]

_FLOWING = ("input", "output", "grad_output", "grad_input")
_ROUNDINGS_OF_LONG = 16.0
"""Epsilons in the rounding of a long dtype."""


def measured_noise(pair: JudgedPair) -> float:
    return 0.0 if pair.policy.noise is None else float(pair.policy.noise[pair.row])


def rounding_of_sources(pair: JudgedPair) -> float:
    """Rounding that comes in unseen: with values that were cast; or where short numbers are processed and the result
    is kept in long ones, like gradients and running statistics."""
    isolated, evidence = pair.evidence.pairs.isolated, pair.evidence
    if isolated is None:  # what comes in was measured; what the code between modules rounds was not
        return short_rounding(pair) if evidence.mixed_rounding and pair.is_made_by_container else 0.0
    kinds = evidence.structure.kind
    kept = pair.kind in GRADIENT_KINDS or pair.kind == "buffer"
    coarse = [evidence.base[s] for s in pair.sources if isolated.cast[s] or (kept and kinds[s] in _FLOWING)]
    longer = pair.policy.lengthening(pair.kind)
    if pair.kind == "param_grad" and pair.is_vector:
        longer = max(longer, roundings_of_partial_sums(pair))
    return assumed(pair, max((*coarse, longer * short_rounding(pair))))


def few_rounded_apart(pair: JudgedPair) -> float:
    """The own code of a container may compute in a short dtype, as under autocast, and keep the result in a long one.
    Of right code, any few elements may be rounded to the other side, by half an epsilon each."""
    elements = max(1, int(pair.evidence.pairs.elements[pair.row]))
    share = max(ROUNDED_APART / elements, SHARE_ROUNDED_APART)
    return float(pair.evidence.short_rounding / 2 * min(1.0, share) ** 0.5)


def rounding_of_mean(pair: JudgedPair) -> float:
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


def error_of_averaged(pair: JudgedPair) -> float:
    """A mean is off by no more than the root mean square of what the numbers that it averages are off by. If these
    cancel out, that is much in relation to the mean."""
    evidence, elements = pair.evidence, pair.evidence.pairs.elements
    if not pair.is_vector or not pair.l2 > 0:
        return 0.0
    given = [source for source in pair.sources_of("input") if not evidence.wrong[source]]
    off = [float(evidence.distance[source]) / max(1, int(elements[source])) ** 0.5 for source in given]
    worst = max((each for each in off if each < float("inf")), default=0.0)
    return float(ENLARGED * worst * int(elements[pair.row]) ** 0.5 / pair.l2)


def error_of_activations(pair: JudgedPair) -> float:
    """Where an activation crosses a kink, as in a ReLU or a maximum, its gradient jumps. With activations that are off
    by e, about a share of e of them does, which moves the gradient by the root of it. If one side includes activations
    in other modules, the gradients before them are not known: what they move adds up in squares."""
    evidence = pair.evidence
    errors = [evidence.propagated[source] for source in pair.right_activations if evidence.is_known(source)]
    return float(evidence.pairs.unseen_kinks * max(errors, default=0.0) ** 0.5)


def absolute_error(pair: JudgedPair) -> float:
    """A module without parameters, such as a ReLU, hardly enlarges numbers: what it returns is off by no more than what
    it got. If it drops most of that, the error is large against the rest."""
    evidence = pair.evidence
    kinds = ("input",) if pair.kind == "output" else ("grad_output",)
    given = [source for source in pair.sources_of(*kinds) if not evidence.wrong[source]]
    distance = max((float(evidence.pairs.distance[source]) for source in given), default=0.0)
    if not pair.l2 > 0 or not distance < float("inf") or pair.has_parameters or pair.is_made_by_container:
        return 0.0
    return min(MOST_ASSUMED, ENLARGED * distance / pair.l2)


def rounding_of_activations(pair: JudgedPair) -> float:
    """A product of short numbers is rounded to their dtype, also if it is kept in a longer one. Under autocast, the
    gradient at the output may be short where the input is not."""
    factors = pair.right_activations + pair.sources_of("grad_output")
    return max((pair.evidence.base[source] for source in factors), default=0.0) / 8


def rounding_of_cancelled_gradient(pair: JudgedPair) -> float:
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


def rounding_of_sum(pair: JudgedPair) -> float:
    evidence = pair.evidence
    rounding = evidence.summed.rounding(pair.row, pair.sources, evidence.error, evidence.wrong)
    if pair.l2 > 0:
        return assumed(pair, rounding / pair.l2)
    return float("inf") if not pair.l2 and evidence.pairs.distance[pair.row] <= rounding else 0.0


def rounding_of_sum_over_step(pair: JudgedPair) -> float:
    """If the micro batches of a step are not comparable, nothing shows how much error came in: gradients of other
    batches are made by other sums in each layer, and then summed in another order."""
    if not pair.l2 > 0:
        return 0.0
    lengthened = pair.base * (pair.policy.lengthening("param_grad") if pair.base < SHORT else 1.0)
    if not pair.is_vector:
        return lengthened
    return max(
        lengthened, assumed(pair, pair.evidence.summed.rounding_over_step(pair.row, pair.evidence.error) / pair.l2)
    )


def systematic_error(pair: JudgedPair) -> float:
    """After an optimizer's step errors are alike at all positions: in a sum they add up, instead of averaging out.

    By Cauchy and Schwarz, a sum of n terms is off by at most sqrt(n) times the norm of their errors.
    """
    if not pair.l2 > 0:
        return 0.0
    return assumed(pair, SYSTEMATIC * pair.incoming * pair.summands**0.5 * pair.terms / pair.l2)


def short_rounding(pair: JudgedPair) -> float:
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


def roundings_of_partial_sums(pair: JudgedPair) -> float:
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


def assumed(pair: JudgedPair, amount: float) -> float:
    """Limit what a rule allows that no measured error backs."""
    return amount if pair.cancels else min(amount, MOST_ASSUMED)
