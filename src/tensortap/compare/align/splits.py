"""Steps that two runs split into other numbers of micro batches: only what a step sums is comparable.

The optimizer gets the same gradient, however the batch is split. The sum is `step_grad` where a run has several micro
steps, and `param_grad` where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment, Ints
from tensortap.compare.align.side import Side

__all__ = ["OtherSplits", "other_micro_batches", "without_other_splits"]

_Step = tuple[int, int]


@dataclass(frozen=True)
class OtherSplits:
    """The steps that the runs split in two ways."""

    micros: Mapping[_Step, tuple[int, int]]
    """By rank and step: the numbers of micro batches of the reference and of the candidate."""
    left_out: tuple[int, int] = (0, 0)
    """How many records of each side are not comparable for that reason."""
    gradients: int = 0
    """How many gradients, summed over a step, were paired."""

    def words(self) -> str:
        """Say what was compared and what was not."""
        (_, step), (ours, theirs) = next(iter(self.micros.items()))
        more = f" (and so in {len(self.micros) - 1:,} more)" if len(self.micros) > 1 else ""
        compared = f"{self.gradients:,} gradients summed over a step were compared"
        if not self.gradients:
            compared = "no gradient summed over a step is known on both sides (capture with optimizer= to record them)"
        return (
            f"The reference splits step {step} into {ours:,} micro batch{'es' * (ours > 1)} and the candidate into "
            f"{theirs:,}{more}: {compared}; {sum(self.left_out):,} records of single micro batches are not comparable"
        )


def other_micro_batches(reference: Side, candidate: Side) -> dict[_Step, tuple[int, int]]:
    """By rank and step: the numbers of micro batches of the two sides, if they differ and the whole batch does not."""
    ours, theirs = _batches(reference), _batches(candidate)
    return {
        step: (len(ours[step]), len(theirs[step]))
        for step in sorted(ours.keys() & theirs.keys())
        if len(ours[step]) != len(theirs[step]) and sum(ours[step].values()) == sum(theirs[step].values())
    }


def without_other_splits(reference: Side, candidate: Side, alignment: Alignment) -> tuple[Alignment, OtherSplits]:
    """Return the alignment without records of steps that were split in another way, but with their summed gradients."""
    micros = other_micro_batches(reference, candidate)
    if not micros:
        return alignment, OtherSplits({})
    apart = [_in_steps(side, micros) & side.phase.among(("forward", "backward")) for side in (reference, candidate)]
    kept = ~(apart[0][alignment.reference] | apart[1][alignment.candidate])
    left, right = alignment.reference[kept], alignment.candidate[kept]
    sums = [_sums(side, micros) for side in (reference, candidate)]
    taken = [set(left.tolist()), set(right.tolist())]
    added = [
        (sums[0][key], sums[1][key])
        for key in sums[0].keys() & sums[1].keys()
        if sums[0][key] not in taken[0] and sums[1][key] not in taken[1]
    ]
    left = np.concatenate([left, np.array([pair[0] for pair in added], np.int64)])
    right = np.concatenate([right, np.array([pair[1] for pair in added], np.int64)])
    order = np.argsort(left, kind="stable")
    found = replace(
        alignment,
        reference=left[order],
        candidate=right[order],
        only_reference=_rest(alignment.only_reference, apart[0], left),
        only_candidate=_rest(alignment.only_candidate, apart[1], right),
    )
    gone = [int(np.sum(mask)) - sum(bool(mask[pair[side]]) for pair in added) for side, mask in enumerate(apart)]
    gradients = len(sums[0].keys() & sums[1].keys())
    return found, OtherSplits(micros, (gone[0], gone[1]), gradients)


def _rest(alone: Ints, apart: npt.NDArray[np.bool_], paired: Ints) -> Ints:
    return np.setdiff1d(alone[~apart[alone]], paired)


def _batches(side: Side) -> dict[_Step, dict[int, int]]:
    """By rank and step: the length of the first input of the root, by micro step."""
    found: dict[_Step, dict[int, int]] = {}
    rows = np.flatnonzero(side.phase.among(("forward",)) & side.kind.among(("input",)) & side.module.among(("",)))
    for row in rows.tolist():
        shape = side.shape(row)
        step = int(side.rank[row]), int(side.step[row])
        if shape:
            found.setdefault(step, {}).setdefault(int(side.micro[row]), shape[0])
    return found


def _in_steps(side: Side, steps: Mapping[_Step, object]) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(side), bool)
    for rank, step in steps:
        found |= (side.rank == rank) & (side.step == step)
    return found


def _sums(side: Side, steps: Mapping[_Step, object]) -> dict[tuple[int, int, str, str], int]:
    """Rows of the gradients that the optimizer got, by rank, step, module and path."""
    found: dict[tuple[int, int, str, str], list[tuple[str, int]]] = {}
    rows = np.flatnonzero(_in_steps(side, steps) & side.kind.among(("param_grad", "step_grad")))
    for row in rows.tolist():
        key = int(side.rank[row]), int(side.step[row]), side.module[row], side.path[row]
        found.setdefault(key, []).append((side.kind[row], row))
    known: dict[tuple[int, int, str, str], int] = {}
    for key, records in found.items():
        summed = [row for kind, row in records if kind == "step_grad"]
        if len(summed) == 1 or len(records) == 1:
            known[key] = (summed or [row for _, row in records])[0]
    return known
