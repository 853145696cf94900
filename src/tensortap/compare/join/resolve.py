"""Questions that only the other side can answer: which of two replicas is right, and how records without a placement
belong together.

Sketches are linear, so the sum and the mean of the members are known from theirs. The hypothesis that is nearest to the
other side's record is taken if it is within rounding, and far nearer than all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from tensortap.compare.join.geometry import cover
from tensortap.compare.join.layout import Layout, Plan, Vote
from tensortap.compare.join.merging import member_sketches
from tensortap.compare.join.pieces import Ints
from tensortap.compare.join.source import JoinedSource
from tensortap.compare.judge.rules.rounding import EPSILON
from tensortap.core.placement import GUESS, Placement
from tensortap.store import Run

__all__ = ["MEAN", "NEAR", "SUM", "Hypotheses", "OtherSide", "compare_members", "key_of", "resolve", "rounding_of"]

_CLEARLY = 0.1
"""How much nearer than the second one the nearest hypothesis must be."""
_STATE = ("param", "buffer")
_MOST = 20_000
SUM, MEAN, NEAR = "sum", "mean", "each"

Floats = npt.NDArray[np.float64]
Key = tuple[int, int, str, str, int, str, str]


def rounding_of(dtype: str) -> float:
    """Return the relative error up to which two records of one value may differ by the order of their sums.

    >>> rounding_of("float32") < 1e-3 < rounding_of("bfloat16") < 0.1
    True
    """
    return float(np.clip(1e3 * EPSILON.get(dtype, 0.0), 1e-4, 0.05))


@dataclass(frozen=True)
class Hypotheses:
    """Relative distances of the members, their sum and their mean from a record of the other side."""

    each: Floats
    sum: float
    mean: float

    def best(self, rounding: float, gradient: bool = True) -> str:
        """Return the hypothesis that holds; empty if none does."""
        worst = float(self.each.max())
        known = {NEAR: worst, SUM: self.sum} | ({MEAN: self.mean} if gradient else {})
        name = min(known, key=lambda each: known[each])
        others = [value for other, value in known.items() if other != name]
        if known[name] <= rounding and known[name] <= _CLEARLY * min(others):
            return name
        return NEAR if worst <= rounding else ""


def compare_members(sketches: Floats, other: Floats) -> Hypotheses | None:
    """Return how far the members of an identity are from the other side's record; None if sketches are missing."""
    size = min(sketches.shape[1], other.size)
    members, target = (each.reshape(len(each), size, -1).sum(axis=2) for each in (sketches, other[None]))
    target = target[0]
    norm = float(np.linalg.norm(target))
    if not np.isfinite(members).all() or not np.isfinite(target).all() or not norm:
        return None
    total = members.sum(axis=0)
    return Hypotheses(
        np.linalg.norm(members - target, axis=1) / norm,
        float(np.linalg.norm(total - target)) / norm,
        float(np.linalg.norm(total / len(members) - target)) / norm,
    )


class OtherSide:
    """The records of the other side by identity, in this side's names."""

    def __init__(self, run: Run, rename: Callable[[str], str] | None = None) -> None:
        self._run = run
        self._rank = run.ranks[0] if run.ranks else 0
        self._rename = rename
        self._rows: dict[Key, int] | None = None

    def row(self, key: Key) -> int | None:
        if self._rows is None:
            names = ("step", "micro", "phase", "module", "call", "kind", "path")
            columns = self._run.columns(self._rank).select(list(names)).to_pydict() if self._run.ranks else {}
            if self._rename is not None and columns:
                known = {name: self._rename(name) for name in set(columns["module"])}
                columns["module"] = [known[name] for name in columns["module"]]
            self._rows = {}
            for at, each in enumerate(zip(*columns.values(), strict=True)):
                self._rows.setdefault(each, at)
        return self._rows.get(key)

    def shape(self, row: int) -> tuple[int, ...]:
        return tuple(self._run.columns(self._rank).column("shape")[row].as_py())

    def digest(self, row: int) -> int:
        return int(self._run.columns(self._rank).column("digest")[row].as_py())

    def sketch(self, row: int) -> Floats:
        matrix, which = self._run.sketches(self._rank)
        if not matrix.size or which[row] < 0:
            return np.full(256, np.nan)
        found: Floats = matrix[which[row]].astype(np.float64)
        return found


def resolve(joined: JoinedSource, other: OtherSide) -> None:
    """Decide tied votes and unknown layouts of a side by the records of the other side."""
    layout = joined.layout
    _withdraw_replicas(layout, other)
    tied = [vote for vote in layout.votes if vote.tied]
    unknown = layout.where(np.array([bool(plan.unknown) for plan in layout.plans], bool)).tolist()[:_MOST]
    groups = [*(vote.group for vote in tied), *unknown]
    if not groups:
        return
    rows = np.unique(np.concatenate([layout.members(group) for group in groups]))
    sketches = _Sketches(joined, rows)
    for vote in tied:
        _decide_vote(layout, vote, sketches, other)
    _drop_guessed_replicas(joined, sketches, other)
    for group in unknown:
        _decide_layout(joined, group, sketches, other)
    joined.changed()


def _withdraw_replicas(layout: Layout, other: OtherSide) -> None:
    """Call the layout of members unknown that were taken for replicas without evidence, and are not the whole."""
    unplaced = np.zeros(len(layout), bool)
    lacking = layout.pieces.placement[layout.order] < 0
    if len(layout):
        unplaced = np.logical_and.reduceat(lacking, layout.begin)
        unplaced |= np.array([plan.guessed for plan in layout.plans], bool)[layout.plan]
    several = np.diff(layout.begin, append=len(layout.order)) > 1
    for group in np.flatnonzero(unplaced & several).tolist():
        plan, row = layout.plan_of(group), other.row(key_of(layout, group))
        if plan.unknown or row is None or other.shape(row) == plan.shape:
            continue
        layout.replace_plan(group, replace(plan, unknown="its ranks hold parts of it, and no placement is known"))
        layout.votes = [vote for vote in layout.votes if vote.group != group]


class _Sketches:
    """The sketches of single members."""

    def __init__(self, joined: JoinedSource, rows: Ints) -> None:
        self._rows = rows
        self._matrix = member_sketches(joined.run, joined.layout.pieces, rows)

    def of(self, rows: Sequence[int] | Ints) -> Floats:
        found: Floats = self._matrix[np.searchsorted(self._rows, np.asarray(rows, np.int64))]
        return found


def key_of(layout: Layout, group: int) -> Key:
    """Return the identity of a group."""
    pieces, row = layout.pieces, int(layout.members(group)[0])
    phase, module, kind, path = layout.spot(group)
    return (int(pieces.step[row]), int(pieces.micro[row]), phase, module, int(pieces.call[row]), kind, path)


def _decide_vote(layout: Layout, vote: Vote, sketches: _Sketches, other: OtherSide) -> None:
    """Let the reference decide between replicas of which none has a majority."""
    row = other.row(key_of(layout, vote.group))
    if row is None:
        return
    plan = layout.plan_of(vote.group)
    if plan.reductions:
        return  # the other side has no record of one summand
    members = np.array([*vote.majority, *vote.odd], np.int64)
    digests = layout.pieces.digest[members]
    # Digests and sketches of parts add up to those of the whole.
    rest = layout.chosen[layout.group == vote.group]
    rest = rest[~np.isin(rest, members)]
    with np.errstate(over="ignore"):
        wholes = digests + layout.pieces.digest[rest].sum(dtype=np.uint64)
    same = members[wholes == np.uint64(other.digest(row))]
    if not len(same):
        found = compare_members(sketches.of(members) + sketches.of(rest).sum(axis=0), other.sketch(row))
        if found is None:
            return
        nearest = int(np.argmin(found.each))
        dtype = layout.pieces.forms[int(layout.pieces.form[members[0]])][0]
        if found.each[nearest] > rounding_of(dtype):
            return  # none of them is right: the pair itself is wrong
        same = members[digests == digests[nearest]]
    odd = tuple(int(each) for each in members.tolist() if each not in set(same.tolist()))
    layout.votes[layout.votes.index(vote)] = Vote(vote.group, tuple(same.tolist()), odd, tied=False)
    layout.choose(vote.group, int(same[0]))


def _drop_guessed_replicas(joined: JoinedSource, sketches: _Sketches, other: OtherSide) -> None:
    """Take members for summands if they were only guessed to be replicas, and their sum or mean is right."""
    layout = joined.layout
    for vote in [each for each in layout.votes if each.tied]:
        plan, members = layout.plan_of(vote.group), layout.members(vote.group)
        row, kind = other.row(key_of(layout, vote.group)), layout.spot(vote.group)[2]
        if not plan.guessed or kind in _STATE or row is None or len(plan.sets) > 1:
            continue
        found = compare_members(sketches.of(members), other.sketch(row))
        dtype = layout.pieces.forms[int(layout.pieces.form[members[0]])][0]
        best = "" if found is None else found.best(rounding_of(dtype), gradient=kind not in ("input", "output"))
        if best in (SUM, MEAN):
            _as_sum(layout, vote.group, plan, plan.shape, best)
            layout.votes.remove(vote)


def _decide_layout(joined: JoinedSource, group: int, sketches: _Sketches, other: OtherSide) -> None:
    """Find out how members without a placement belong together."""
    layout = joined.layout
    row = other.row(key_of(layout, group))
    if row is None:
        return
    pieces, members, plan = layout.pieces, layout.members(group), layout.plan_of(group)
    shapes = [pieces.forms[form][1] for form in pieces.form[members].tolist()]
    whole = other.shape(row)
    known = [pieces.placements[number] for number in pieces.placement[members].tolist() if number >= 0]
    if any(not placement.guessed for placement in known):
        return  # placements that contradict each other are not replaced by a guess
    if all(shape == whole for shape in shapes):
        kind = layout.spot(group)[2]
        if kind in _STATE:
            _as_replicas(layout, group, plan, other.digest(row))
            return
        found = compare_members(sketches.of(members), other.sketch(row))
        if found is None:
            return
        dtype = pieces.forms[int(pieces.form[members[0]])][0]
        best = found.best(rounding_of(dtype), gradient=kind not in ("input", "output"))
        if best == NEAR:
            layout.replace_plan(group, replace(_replicas(plan, whole), guessed=True))
            _note_odd(layout, group, int(members[np.argmin(found.each)]))
        elif best:
            _as_sum(layout, group, plan, whole, MEAN if best == MEAN else SUM)
        return
    _as_shards(joined, group, plan, shapes, whole)


def _digests(layout: Layout, group: int) -> list[int]:
    found: list[int] = layout.pieces.digest[layout.members(group)].tolist()
    return found


def _replicas(plan: Plan, shape: tuple[int, ...]) -> Plan:
    extent = tuple((0, size) for size in shape)
    return Plan(plan.places, shape, (tuple(range(len(plan.places))),), (0,), cover(shape, [(extent,)]))


def _as_replicas(layout: Layout, group: int, plan: Plan, digest: int) -> None:
    """Take parameters of the other side's shape for replicas. Those with its digest are right."""
    members = layout.members(group)
    layout.replace_plan(group, replace(_replicas(plan, plan.shape), guessed=True))
    digests = layout.pieces.digest[members]
    right = members[digests == np.uint64(digest)]
    if not len(right):
        values, counts = np.unique(digests, return_counts=True)
        right = members[digests == values[np.argmax(counts)]]
    _note_odd(layout, group, int(right[0]))


def _note_odd(layout: Layout, group: int, right: int) -> None:
    """Note the replicas that differ from the right one."""
    members, digests = layout.members(group), layout.pieces.digest
    same = members[digests[members] == digests[right]]
    if len(same) < len(members):
        odd = tuple(each for each in members.tolist() if each not in set(same.tolist()))
        layout.votes.append(Vote(group, tuple(same.tolist()), odd, tied=False))
    layout.choose(group, int(same[0]))


def _as_sum(layout: Layout, group: int, plan: Plan, shape: tuple[int, ...], reduction: str) -> None:
    members = layout.members(group)
    axis = layout.pieces.axis_between(tuple(layout.pieces.rank[members].tolist()))
    each = tuple((number,) for number in range(len(members)))
    found = Plan(
        plan.places,
        shape,
        each,
        tuple(range(len(members))),
        _replicas(plan, shape).covering,
        weight=1 / len(members) if reduction == MEAN else 1.0,
        reductions=((axis, reduction),),
        guessed=True,
    )
    layout.replace_plan(group, found)


def _as_shards(
    joined: JoinedSource, group: int, plan: Plan, shapes: list[tuple[int, ...]], whole: tuple[int, ...]
) -> None:
    """Take members for consecutive parts along the one dimension in which they are shorter than the whole.

    Their digests and sketches were made at other positions: only their bytes can be compared.
    """
    layout = joined.layout
    if len({len(shape) for shape in (*shapes, whole)}) > 1 or not whole:
        return
    shorter = [at for at, size in enumerate(whole) if any(shape[at] != size for shape in shapes)]
    if len(shorter) != 1 or sum(shape[shorter[0]] for shape in shapes) != whole[shorter[0]]:
        return
    if len({shape[shorter[0]] for shape in shapes}) == 1 and len(set(_digests(layout, group))) == 1 < len(shapes):
        return  # equal parts may be replicas of one part
    axis, start = shorter[0], 0
    pieces, members = layout.pieces, layout.members(group)
    name = pieces.axis_between(tuple(pieces.rank[members].tolist()))
    for member, shape in zip(members.tolist(), shapes, strict=True):
        box = tuple((0, start if at == axis else 0, size) for at, size in enumerate(shape))
        start += shape[axis]
        pieces.placements.append(Placement(whole, (box,), {name: "shard"}, GUESS))
        pieces.placement[member] = len(pieces.placements) - 1
    each = tuple((number,) for number in range(len(members)))
    covering = cover(whole, [(tuple((0, size) for size in whole),)])
    layout.replace_plan(group, Plan(plan.places, whole, each, (0,) * len(each), covering, guessed=True))
    joined.without_positions.add(group)
    joined.guessed.add(group)
    assert prod(whole) == sum(prod(shape) for shape in shapes)
