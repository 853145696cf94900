"""Modules that two runs call in another pattern for the same maths: experts one by one or in a batch, a block a chunk.

The n-th call of one side is then not the n-th call of the other. Single calls are not comparable; what the callers make
of them is. If joining the calls of each side gives the same tensors, the note on them says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.core.records import display_name

__all__ = ["OtherCalls", "without_other_calls"]

_FLOWING = ("input", "output", "grad_input", "grad_output")
_LARGEST = 1 << 22
"""Elements up to which calls are joined and compared."""
_AGREE = 1e-4
"""Relative error up to which joined calls count as the same."""
_Spot = tuple[int, int, int, str]
"""Rank, step, micro step and module."""


_Calls = dict[_Spot, dict[int, list[int]]]
"""By spot and call: the rows of a forward pass."""


@dataclass(frozen=True)
class OtherCalls:
    """The modules that the runs call in two patterns."""

    calls: Mapping[_Spot, tuple[int, int]]
    """How often the reference and the candidate call each."""
    left_out: tuple[int, int] = (0, 0)
    """How many records of each side are not comparable for that reason."""
    joined: int = 0
    """How many of them return the same if the calls of each side are joined."""

    def words(self) -> str:
        """Say which modules these are, and what was not compared."""
        (_, _, _, module), (ours, theirs) = next(iter(self.calls.items()))
        more = len({spot[3] for spot in self.calls}) - 1
        so_too = f" (and so with {more:,} more module{'s' * (more > 1)})" if more else ""
        joined = f"; joined, the outputs of {self.joined:,} of {len(self.calls):,} agree" if self.joined else ""
        return (
            f"{display_name(module)} is called {_times(ours)} in the reference and {_times(theirs)} in the candidate, "
            f"on other parts{so_too}: {sum(self.left_out):,} records of single calls are not comparable{joined}"
        )


def without_other_calls(reference: Side, candidate: Side, alignment: Alignment) -> tuple[Alignment, OtherCalls]:
    """Return the alignment without the calls of modules that the sides call another number of times, on other sizes."""
    left, right = alignment.reference, alignment.candidate
    sizes = reference.elements[left] != candidate.elements[right]
    other = np.flatnonzero(sizes & reference.kind.among(_FLOWING)[left])
    if not len(other):
        return alignment, OtherCalls({})
    spots = {_spot(reference, row) for row in left[other].tolist()}
    names = {spot[3] for spot in spots}
    sides = [_calls(side, _names_within(side, names)) for side in (reference, candidate)]
    patterns: dict[_Spot, tuple[int, int]] = {}
    for spot in sorted(sides[0].keys() & sides[1].keys()):
        counts = len(sides[0][spot]), len(sides[1][spot])
        inside = any(found[:3] == spot[:3] and spot[3].startswith(f"{found[3]}.") for found in patterns)
        if counts[0] != counts[1] and (spot in spots or inside):
            patterns[spot] = counts
    dense = _given_every_token((reference, sides[0]), (candidate, sides[1]), spots)
    patterns |= {
        spot: (len(sides[0][spot]), len(sides[1][spot]))
        for spot in sorted(sides[0].keys() & sides[1].keys())
        if any(spot == each or (spot[:3] == each[:3] and spot[3].startswith(f"{each[3]}.")) for each in dense)
    }
    if not patterns:
        return alignment, OtherCalls({})
    apart = [_of_spots(side, patterns) for side in (reference, candidate)]
    kept = ~(apart[0][left] | apart[1][right])
    found = replace(
        alignment,
        reference=left[kept],
        candidate=right[kept],
        only_reference=alignment.only_reference[~apart[0][alignment.only_reference]],
        only_candidate=alignment.only_candidate[~apart[1][alignment.only_candidate]],
    )
    joined = sum(_agree_joined((reference, sides[0][spot]), (candidate, sides[1][spot])) for spot in patterns)
    return found, OtherCalls(patterns, (int(apart[0].sum()), int(apart[1].sum())), joined)


def _given_every_token(ours: tuple[Side, _Calls], theirs: tuple[Side, _Calls], spots: Collection[_Spot]) -> set[_Spot]:
    """Return experts to which one side gives every token, and the other side a share of them: together as many as the
    experts that each token chose. What was not chosen has no weight in what the caller returns."""
    groups: dict[tuple[int, int, int, str, str], list[_Spot]] = {}
    for spot in spots:
        if spot[3].rpartition(".")[2].isdigit() and all(len(calls.get(spot, ())) == 1 for _, calls in (ours, theirs)):
            cls = ours[0].cls[ours[1][spot][next(iter(ours[1][spot]))][0]]
            groups.setdefault((*spot[:3], spot[3].rpartition(".")[0], cls), []).append(spot)
    found: set[_Spot] = set()
    for group in groups.values():
        lengths = [[_length(*side, spot) for spot in group] for side in (ours, theirs)]
        for every, some in (lengths, lengths[::-1]):
            tokens = every[0] if len(set(every)) == 1 else 0
            if len(group) > 1 and tokens and every != some and sum(some) % tokens == 0 and max(some) <= tokens:
                found |= set(group)
    return found


def _length(side: Side, calls: _Calls, spot: _Spot) -> int:
    """Return the length of the first axis of what the only call of a module is given."""
    (rows,) = calls[spot].values()
    given = [side.shape(row) for row in rows if side.kind[row] == "input"]
    return given[0][0] if given and given[0] else 0


def _spot(side: Side, row: int) -> _Spot:
    return int(side.rank[row]), int(side.step[row]), int(side.pass_number[row]), side.module[row]


def _names_within(side: Side, names: Collection[str]) -> list[str]:
    """Return these modules and all inside."""
    return [word for word in side.module.words if any(word == name or word.startswith(f"{name}.") for name in names)]


def _calls(side: Side, names: Collection[str]) -> _Calls:
    found: _Calls = {}
    rows = np.flatnonzero(side.module.among(tuple(names)) & side.kind.among(("input", "output")))
    for row in rows.tolist():
        found.setdefault(_spot(side, row), {}).setdefault(int(side.call[row]), []).append(row)
    return found


def _of_spots(side: Side, spots: Collection[_Spot]) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(side), bool)
    names = tuple({spot[3] for spot in spots})
    for row in np.flatnonzero(side.module.among(names) & side.kind.among(_FLOWING)).tolist():
        found[row] = _spot(side, row) in spots
    return found


def _agree_joined(ours: tuple[Side, Mapping[int, list[int]]], theirs: tuple[Side, Mapping[int, list[int]]]) -> bool:
    """Whether the outputs of all calls of each side, joined along one axis, are the same."""
    parts = [_outputs(*side) for side in (ours, theirs)]
    if not parts[0] or not parts[1]:
        return False
    for axis in range(parts[0][0].ndim):
        whole = [_join(arrays, axis) for arrays in parts]
        if whole[0] is None or whole[1] is None or whole[0].shape != whole[1].shape:
            continue
        size = float(np.linalg.norm(whole[0]))
        if size and float(np.linalg.norm(whole[0] - whole[1])) <= _AGREE * size:
            return True
    return False


def _outputs(side: Side, calls: Mapping[int, list[int]]) -> list[npt.NDArray[np.float64]]:
    """Return the only output of each call; nothing if there are several, or they were not stored."""
    found = []
    for number in sorted(calls):
        rows = [row for row in calls[number] if side.kind[row] == "output"]
        if len(rows) != 1 or not side.kept[rows[0]]:
            return []
        found.append(rows[0])
    if sum(int(side.elements[row]) for row in found) > _LARGEST:
        return []
    return [side.array(row).astype(np.float64) for row in found]


def _join(arrays: Sequence[npt.NDArray[np.float64]], axis: int) -> npt.NDArray[np.float64] | None:
    shapes = {array.shape[:axis] + array.shape[axis + 1 :] if array.ndim > axis else None for array in arrays}
    return np.concatenate(arrays, axis) if len(shapes) == 1 and None not in shapes else None


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
