"""Amounts of the rules for what an optimizer gets and makes, in columns: clipped gradients, and parameters.

They depend on all gradients of a step. Gradients that are not judged yet count as right, as in `judging`; the judge
drops an amount if one of them turns out to be wrong meanwhile.
"""

from __future__ import annotations

import numpy as np

from tensortap.compare.align.side import Ints
from tensortap.compare.judge.pairs import Floats
from tensortap.compare.judge.row_lists import largest
from tensortap.compare.judge.rules.columns import Bools, PairColumns, root
from tensortap.compare.judge.rules.margins import (
    FLIPPED,
    FLIPPED_MAPPED,
    FLIPPED_UNEVEN,
    MAGNIFIED,
    MOST_ASSUMED,
)
from tensortap.compare.judge.rules.optimizer_gradients import SAME_CLIPPING

__all__ = ["error_of_clipping", "error_of_norm", "magnified_noise"]


def error_of_norm(pairs: PairColumns) -> Floats:
    optimizer = pairs.evidence.optimizer
    steps, which = _steps(pairs, pairs.rows)
    errors = [min(MOST_ASSUMED, 2 * optimizer.error_of_norm_at(at, pairs.judged)) for at in steps]
    return np.array(errors, float)[which]


def error_of_clipping(pairs: PairColumns) -> Floats:
    evidence = pairs.evidence
    steps, which = _steps(pairs, pairs.rows)
    norms = [evidence.optimizer.norms_of(at) for at in steps]
    single = pairs.counts == 1
    own: Ints = np.zeros(len(pairs.rows), np.int64)
    own[single] = pairs.sources[(np.cumsum(pairs.counts) - pairs.counts)[single]]
    factors = []
    clipped = single
    with np.errstate(all="ignore"):
        for l2, before in (
            (evidence.pairs.l2, [each.reference for each in norms]),
            (evidence.pairs.candidate_l2, [each.candidate for each in norms]),
        ):
            norm = np.array([np.nan if each is None else each for each in before], float)[which]
            clipped = clipped & (l2[own] > 0) & (norm > 0) & (norm < np.inf)
            factors.append((l2[pairs.rows] / l2[own], norm))
        (ours, our_norm), (theirs, their_norm) = factors
        explained = our_norm / their_norm
        allowed = pairs.base + SAME_CLIPPING * np.abs(explained - 1)
        clipped = clipped & (ours > 0) & ~(np.abs(theirs / ours / explained - 1) > allowed)
        amount = 2 * (np.abs(explained - 1) + explained * evidence.pairs.error[own])
    return np.where(clipped, amount, 0.0)


def magnified_noise(pairs: PairColumns) -> Floats:
    evidence = pairs.evidence
    errors = evidence.pairs.error[pairs.sources]
    known = np.where(errors < np.inf, errors, 0.0)
    are_gradients = pairs.are_of("param_grad", "step_grad")
    with_gradients = _having(pairs, are_gradients)
    noise = pairs.worst_of(known, "param_grad", "step_grad")
    noise[~with_gradients] = _noise_of_others(pairs, pairs.rows[~with_gradients])
    share = np.where(pairs.is_vector, *_noise_of_vectors_and_matrices(pairs, noise, with_gradients))
    unclipped = ~_having(pairs, pairs.are_of("step_grad"))  # their gradients may have been clipped by another norm
    share[unclipped] = np.maximum(share[unclipped], _error_of_norms(pairs, pairs.rows[unclipped]))
    return share * _step_sizes(pairs)


def _noise_of_vectors_and_matrices(pairs: PairColumns, noise: Floats, with_gradients: Bools) -> tuple[Floats, Floats]:
    """Return what noise does to the step of a vector, and to that of a matrix; the rule for one pair explains it."""
    roots = root(noise)
    shares, uneven = _gradients_so_far(pairs)
    measured = with_gradients & ~np.isnan(shares)
    of_vectors = np.where(measured, np.minimum(2.0, MAGNIFIED * shares), 2.0 * (noise != 0))
    if pairs.evidence.policy.mapped:
        return of_vectors, np.minimum(1.0, FLIPPED_MAPPED * roots)
    flipped = np.where(uneven, FLIPPED_UNEVEN, FLIPPED) * roots
    return of_vectors, np.minimum(1.0, np.where(measured, np.maximum(2 * roots, MAGNIFIED * shares), flipped))


def _gradients_so_far(pairs: PairColumns) -> tuple[Floats, Bools]:
    """Return for each parameter the worst share of its gradients, NaN if it is not known; and whether they are uneven,
    which only matters if the share is not known."""
    optimizer, scope = pairs.evidence.optimizer, pairs.evidence.structure.scope
    shares, uneven = np.full(len(pairs.rows), np.nan), np.zeros(len(pairs.rows), bool)
    for place, row in enumerate(pairs.rows.tolist()):
        gradients, step = optimizer.so_far(row), scope[row][1]
        share = gradients.worst_share(step)
        if share is not None:
            shares[place] = share
        uneven[place] = gradients.are_uneven(step)
    return shares, uneven


def _noise_of_others(pairs: PairColumns, rows: Ints) -> Floats:
    optimizer = pairs.evidence.optimizer
    steps, which = _steps(pairs, rows, since_last=True)
    return np.array([optimizer.noise_of_step(at) for at in steps], float)[which]


def _error_of_norms(pairs: PairColumns, rows: Ints) -> Floats:
    steps, which = _steps(pairs, rows, since_last=True)
    errors = pairs.evidence.optimizer.errors_of_norms(steps, pairs.judged)
    return np.array([min(1.0, 2 * errors[at]) for at in steps], float)[which]


def _step_sizes(pairs: PairColumns) -> Floats:
    """Return how far each parameter of the reference moved since it was last recorded, relative to its size."""
    found = np.ones(len(pairs.rows))
    are_states = pairs.are_of("param")
    moved = _having(pairs, are_states)
    found[moved] = pairs.evidence.reference_moved(pairs.sources[are_states], pairs.rows[moved])
    return found


def _having(pairs: PairColumns, of_sources: Bools) -> Bools:
    """Return for each pair whether something is so for any of its sources."""
    return largest(of_sources.astype(float), pairs.counts) > 0


def _steps(pairs: PairColumns, rows: Ints, since_last: bool = False) -> tuple[list[tuple[int, int]], Ints]:
    """Return the rank and step of rows, and which of these each row has.

    since_last: the step that moved a parameter, which is the one before if it was recorded before the step.
    """
    structure = pairs.evidence.structure
    ranks, steps = structure.ranks_and_steps(rows)
    if since_last:
        steps = steps - (structure.call_numbers(rows) == 0)
    places, which = np.unique(np.stack([ranks, steps]), axis=1, return_inverse=True)
    return [(rank, step) for rank, step in places.T.tolist()], which.reshape(-1)
