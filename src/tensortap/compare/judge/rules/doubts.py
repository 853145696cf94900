"""Doubts about pairs beyond their tolerance: rounding inside the code that made them may be the reason."""

from __future__ import annotations

from tensortap.compare.judge.rules.amounts import roundings_of_partial_sums, short_rounding
from tensortap.compare.judge.rules.evidence import JudgedPair
from tensortap.compare.judge.rules.margins import CANCELLED, MOST_ASSUMED, PARTLY_CANCELS, SHORT
from tensortap.compare.judge.rules.names import MOVED_TIES, NAIVE_SUM, ROUNDING_INSIDE
from tensortap.core.records import GRADIENT_KINDS

__all__ = ["doubt_rounding"]

_MOST_DOUBTED = 1 / 3
"""The largest relative error of a sum of short numbers that is left unjudged. Half of a batch is more; so is
a factor of 1.2, which counts double along the tensor."""
_FEW_ROUNDINGS = 4.0
"""Epsilons by which a module that calls no others may magnify its roundings."""
_RUNS_OF_ONE_SIGN = 2.0
"""Size of a sum over that of one with random signs, from which on its terms come in runs of one sign."""


def doubt_rounding(pair: JudgedPair, error: float) -> str:
    """Return why rounding may explain a pair beyond its tolerance; empty if it does not."""
    if _is_doubtful_sum(pair, error):
        return NAIVE_SUM
    if _is_doubtful_rounding(pair, error):
        return ROUNDING_INSIDE
    return MOVED_TIES if _moved_ties(pair) else ""


def _is_doubtful_sum(pair: JudgedPair, error: float) -> bool:
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
    return rounding >= SHORT and error <= rounding * max(roundings_of_partial_sums(pair), _roundings_of_runs(pair))


def _roundings_of_runs(pair: JudgedPair) -> float:
    """Return how many epsilons a sum of n terms is off that come in runs of one sign, such as the positions of an
    image under a mean. Partial sums are then as large as the whole for most of the time, though runs cancel out."""
    n, terms = pair.summands, pair.terms
    if not (pair.l2 > 0 and terms > 0 and n > 0):
        return 0.0
    if pair.policy.noise is not None and pair.l2 < _RUNS_OF_ONE_SIGN * terms:
        return 0.0  # runs may cancel each other, but then measured noise shows it
    return n / 4 * max(1.0, terms / pair.l2)


def _is_doubtful_rounding(pair: JudgedPair, error: float) -> bool:
    """Whether a pair is off by more than is allowed, and rounding inside its code may be the reason.

    Only measured noise shows how far the code magnifies it. A module that calls no others magnifies it little. The
    gradient of values that cancel out is as rough as the gradient that came in.
    """
    rounding, isolated = short_rounding(pair), pair.evidence.pairs.isolated is not None
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


def _moved_ties(pair: JudgedPair) -> bool:
    """Whether a cast moved ties of a maximum with overlapping windows.

    An element that loses a window to another may keep others: it is zero on neither side. There are about as many
    of these as of those that crossed, and a share s of all moves the rest by sqrt(s). Rows say nothing: few of
    their elements are the largest of a window.
    """
    pairs, row = pair.evidence.pairs, pair.row
    if pairs.isolated is None or pair.kind not in ("grad_output", "grad_input") or pair.policy.fixed:
        return False
    if not any(pairs.isolated.cast[source] for source in pair.right_activations):
        return False
    kink = pairs.kink_of(row)
    passed = int(pairs.elements[row] - pairs.zeros[row])
    if kink is None or not passed or kink.crossed > passed / 64:
        return False
    return kink.rel_l2 <= float((kink.crossed / passed) ** 0.5)
