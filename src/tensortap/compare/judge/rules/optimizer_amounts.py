"""How far off an optimizer's step may be, pair by pair; `optimizer_columns` has the same in columns."""

from __future__ import annotations

from tensortap.compare.judge.rules.evidence import JudgedPair
from tensortap.compare.judge.rules.margins import (
    FLIPPED,
    FLIPPED_MAPPED,
    FLIPPED_UNEVEN,
    MAGNIFIED,
    ORTHOGONAL_FLOOR,
    ORTHOGONALIZED,
)
from tensortap.compare.judge.rules.rounding import EPSILON

__all__ = ["magnified_noise"]


def magnified_noise(pair: JudgedPair) -> float:
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


def _noise_of_vector(pair: JudgedPair, noise: float) -> float:
    """Part of a vector may be zero in theory, as the keys' part of a bias: any noise may flip it. If the elements of
    its gradients are known, so far, they show how many have a sign that noise decides."""
    evidence = pair.evidence
    share = evidence.optimizer.so_far(pair.row).worst_share(evidence.structure.scope[pair.row][1])
    if not pair.sources_of("step_grad", "param_grad") or share is None:
        return 2.0 * bool(noise)
    return min(2.0, MAGNIFIED * share)


def _noise_of_orthogonal_step(pair: JudgedPair) -> float:
    """Some optimizers multiply all singular values of a gradient, or of its moment, until they are about 1. They do so
    in bfloat16, so that any noise which rounds an element to the other side grows with the small ones. So does that of
    other kernels, if the gradients are equal."""
    evidence = pair.evidence
    noise = evidence.optimizer.so_far(pair.row).worst_error(evidence.structure.scope[pair.row][1])
    return float(min(2.0, max(ORTHOGONAL_FLOOR, ORTHOGONALIZED * (EPSILON["bfloat16"] * noise) ** 0.5)))
