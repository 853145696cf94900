"""A constant factor between the gradients of two runs, which averaging the loss over other numbers of tokens makes.

A data parallel rank averages its loss over its own rows, so its gradients are larger than those of one process, by the
number of ranks; the average over ranks makes up for it. Such a factor is a note. If the optimizer gets
scaled gradients, too, it is a finding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Ints, Side
from tensortap.compare.join.pieces import MICRO
from tensortap.compare.join.source import JoinedSource, joined_source
from tensortap.compare.say.formatting import rounded
from tensortap.core.causes import Cause
from tensortap.core.records import Finding, LayoutFact
from tensortap.core.sketches import of_one_size

__all__ = ["NO_SCALING", "Scaling", "batch_axes", "find_scaling"]

_FLOWING = ("grad_input", "grad_output")
_CLASSES = (_FLOWING, ("param_grad",), ("step_grad",))
_TENSOR_AXES = ("tp", "mp", "model", "pp", "pipe", "stage", "ep", "expert")
"""Beginnings of the names of axes along which no batch is split."""
_SAME_FACTOR = 0.02
_MOST_OFF = 0.1
_AGREE = 0.8
"""Share of the gradients that must have the factor."""
_LEAST = 2

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scaling:
    """Factors of the candidate's gradients, relative to the reference's."""

    flowing: float = 1.0
    parameters: float = 1.0
    steps: float = 1.0
    axis: str = ""
    explained: bool = False
    """Whether the numbers of ranks that split the batch explain the factor."""
    reduced_seen: bool = True
    """Whether the optimizer's gradients were recorded, or those of parameters are right."""

    @property
    def is_wrong(self) -> bool:
        """Whether the optimizer gets gradients of another scale."""
        return self.steps != 1.0

    @property
    def is_open(self) -> bool:
        """Whether it is not known that a reduction makes up for the factor."""
        return self.parameters != 1.0 and not self.reduced_seen

    def note(self) -> str:
        """Say what was allowed; empty if there is no factor."""
        if self.is_wrong or not self.explained:
            return ""
        over = f" on {self.axis} ranks" if self.axis else ""
        over = " in micro batches" if self.axis == MICRO else over
        text = (
            f"the candidate's gradients are {rounded(self.flowing if self.flowing != 1.0 else self.parameters)} times "
            f"the reference's before they are reduced: its loss is averaged over other numbers of elements{over}"
        )
        if self.is_open:
            text += '; whether the reduction makes up for it was not recorded: capture with optimizer= or kinds "param"'
        return text

    def found_in(self, birth: Finding) -> Finding:
        """Return a birth among the gradients with this cause."""
        kinds = ("grad_output", "grad_input", "param_grad", "step_grad")
        if not self.is_wrong or birth.key.kind not in kinds or birth.difference is None:
            return birth
        words = rounded(self.steps)
        return replace(birth, cause=Cause.GRADIENT_SCALE, layout=LayoutFact(self.axis, (birth.rank,), 1, words))


NO_SCALING = Scaling()


def find_scaling(reference: Side, candidate: Side, alignment: Alignment) -> Scaling:
    """Find the factor between the gradients of two runs of which one has several ranks, and take it out of the
    candidate's gradients if splitting the batch explains it."""
    joined = joined_source(candidate.run)
    other = joined_source(reference.run)
    if joined is None or max(len(each.run.ranks) for each in (joined, other) if each is not None) < 2:
        return NO_SCALING
    factors, rows = [], []
    for kinds in _CLASSES:
        found = np.flatnonzero(reference.kind.among(kinds)[alignment.reference]) if len(alignment.reference) else None
        pairs = np.empty(0, np.int64) if found is None else found
        rows.append(pairs)
        factors.append(_common_factor(reference, candidate, alignment, pairs))
    flowing, parameters, steps = factors
    if flowing in (None, 1.0) and parameters in (None, 1.0) and steps in (None, 1.0):
        return NO_SCALING
    known, axis = _explanations(joined, other)
    worst = next(each for each in (flowing, parameters, steps) if each not in (None, 1.0))
    explained = any(abs(worst / each.factor - 1) < _SAME_FACTOR for each in known)
    result = Scaling(
        flowing or 1.0, parameters or 1.0, steps or 1.0, axis, explained, steps is not None or parameters == 1.0
    )
    if not result.is_wrong and explained:
        for factor, pairs in zip((flowing, parameters), rows, strict=False):
            if factor not in (None, 1.0):
                nearest = min(known, key=lambda each: abs(each.factor / float(factor) - 1))
                _take_out(reference, candidate, alignment, pairs, nearest)
    return result if explained else NO_SCALING


class _Explanation(NamedTuple):
    """A factor, and the axes of both sides that make it, each with its share."""

    factor: float
    shares: dict[tuple[str, str], float]


def _take_out(reference: Side, candidate: Side, alignment: Alignment, pairs: Ints, explanation: _Explanation) -> None:
    """Divide the candidate's records by the factor, except for the share of axes over which a record is a mean."""
    by_factor: dict[float, list[int]] = {}
    sides = (("reference", reference, alignment.reference), ("candidate", candidate, alignment.candidate))
    for pair in pairs.tolist():
        averaged = {(name, axis) for name, side, rows in sides for axis in _averaged(side, int(rows[pair]))}
        share = float(np.prod([value for axis, value in explanation.shares.items() if axis in averaged]))
        by_factor.setdefault(share / explanation.factor, []).append(int(alignment.candidate[pair]))
    for factor, chosen in by_factor.items():
        if factor != 1.0:
            candidate.rescale(np.array(chosen, np.int64), factor)


def _averaged(side: Side, row: int) -> set[str]:
    """Return the axes over which a record is a mean already."""
    joined = joined_source(side.run)
    if joined is None:
        return set()
    plan = joined.layout.plan_of(int(joined.groups[side.row[row]]))
    return {axis for axis, reduction in plan.reductions if reduction != "sum"}


def _common_factor(reference: Side, candidate: Side, alignment: Alignment, pairs: Ints) -> float | None:
    """Return the factor that most gradients of a class have; None if there is none in common."""
    factor, off = _factors(reference, candidate, alignment, pairs)
    good = np.isfinite(factor) & (off < _MOST_OFF) & (factor > 0)
    if good.sum() < max(_LEAST, _AGREE * np.isfinite(factor).sum()):
        return None
    middle = float(np.median(factor[good]))
    agreeing = np.abs(factor[good] / middle - 1) < _SAME_FACTOR
    if agreeing.sum() < _AGREE * len(agreeing):
        return None
    return 1.0 if abs(middle - 1) < _SAME_FACTOR else middle


def _factors(reference: Side, candidate: Side, alignment: Alignment, pairs: Ints) -> tuple[Floats, Floats]:
    """Return the factor of each pair that fits best, and how far off it is; NaN where a sketch is missing."""
    factor, off = np.full(len(pairs), np.nan), np.full(len(pairs), np.nan)
    if not len(pairs):
        return factor, off
    (ours, left), (theirs, right) = reference.sketches(), candidate.sketches()
    if not ours.size or not theirs.size:
        return factor, off
    ours, theirs = of_one_size([ours, theirs])
    one, other = left[alignment.reference[pairs]], right[alignment.candidate[pairs]]
    known = np.flatnonzero((one >= 0) & (other >= 0))
    a, b = ours[one[known]].astype(np.float64), theirs[other[known]].astype(np.float64)
    with np.errstate(all="ignore"):
        factor[known] = np.einsum("ij,ij->i", a, b) / np.einsum("ij,ij->i", a, a)
        off[known] = np.linalg.norm(b - factor[known][:, None] * a, axis=1) / np.linalg.norm(b, axis=1)
        moved = reference.reordered[alignment.reference[pairs]] | candidate.reordered[alignment.candidate[pairs]]
        norms = candidate.l2[alignment.candidate[pairs]] / reference.l2[alignment.reference[pairs]]
        factor[moved], off[moved] = norms[moved], 0.0  # sketches of other positions say nothing
    return factor, off


def _explanations(joined: JoinedSource, other: JoinedSource | None) -> tuple[list[_Explanation], str]:
    """Return the factors that other numbers of rows or tokens in an average make, and the axis that splits them."""
    found, axis = [_Explanation(1.0, {})], ""
    for source, power in ((joined, 1), (other, -1)):
        if source is None:
            continue
        for name, size in batch_axes(source).items():
            share = float(size) ** power
            own = ("candidate" if source is joined else "reference", name)
            found += [_Explanation(each.factor * share, {**each.shares, own: share}) for each in found]
            axis = axis or name
    found += [_Explanation(1 / factor, {name: 1 / share for name, share in shares.items()}) for factor, shares in found]
    return [each for each in found if each.factor != 1.0], axis


def batch_axes(source: JoinedSource) -> dict[str, int]:
    """Return the axes that split a batch, with their sizes; without a mesh, the ranks may do so."""
    pieces = source.layout.pieces
    mesh = next(iter(pieces.meshes.values()), None)
    micro = {MICRO: count} if (count := len(pieces.ranks) // max(1, len(source.run.ranks))) > 1 else {}
    if mesh is None:
        return {"": len(source.run.ranks), **micro} if len(source.run.ranks) > 1 else micro
    sizes = zip(mesh.names, mesh.sizes, strict=True)
    batch = {name: size for name, size in sizes if size > 1 and not name.lower().startswith(_TENSOR_AXES)}
    return {**batch, **micro}
