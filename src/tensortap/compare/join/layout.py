"""The layout of each identity: which ranks hold other parts of it, the same part, or a summand.

Most identities share a layout. It is worked out once for each combination of ranks and placements, and applied to whole
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tensortap.compare.join.geometry import Covering, Region, cover, region_of
from tensortap.compare.join.pieces import Ints, Pieces
from tensortap.core.placement import Placement

__all__ = ["Layout", "Plan", "Vote", "lay_out"]

_STATE = ("param", "buffer")
_MIX = np.uint64(0x9E3779B97F4A7C15)
_KNOWN_REDUCTIONS = ("sum", "mean", "avg")


@dataclass(frozen=True)
class Plan:
    """How the members of an identity make up a whole. Members are counted in order of rank."""

    places: tuple[int, ...]
    """Position of each member's rank in `Pieces.ranks`."""
    shape: tuple[int, ...]
    """Shape of the whole."""
    sets: tuple[tuple[int, ...], ...]
    """Members that hold the same part: replicas of each other."""
    terms: tuple[int, ...]
    """For each set, the summand that it is a part of."""
    covering: Covering
    """How the sets of the worst summand cover the whole."""
    weight: float = 1.0
    """Factor of the sum: that of a mean is less than 1."""
    lacking: int = 0
    """Summands that no rank has recorded."""
    reductions: tuple[tuple[str, str], ...] = ()
    """Axes along which members are summands, with their reduction."""
    unknown: str = ""
    """Why it is not known how the members belong together; empty if it is."""
    flat: bool = False
    """Whether parts are ranges of flat positions."""
    guessed: bool = False
    """Whether the layout follows from a convention alone."""

    @property
    def is_sum(self) -> bool:
        return max(self.terms, default=0) > 0 or self.weight != 1.0

    @property
    def is_joined(self) -> bool:
        """Whether the whole consists of several parts."""
        return len(self.sets) > 1


@dataclass(frozen=True)
class Vote:
    """Replicas of which not all are equal. Members are rows of `Pieces`."""

    group: int
    majority: tuple[int, ...]
    """Members with the most common digest; the first of them stands for all."""
    odd: tuple[int, ...]
    tied: bool
    """Whether another digest is as common."""


@dataclass
class Layout:
    """The layouts of all identities of a run. Identities are numbered; the number is a group."""

    pieces: Pieces
    plans: list[Plan]
    plan: Ints
    """Number of each group's plan."""
    begin: Ints
    order: Ints
    """Rows of `Pieces`, group by group, by rank within each; `begin` is the first of each group."""
    chosen: Ints
    """Rows that stand for their replicas: one for each set."""
    group: Ints
    """Group of each chosen row, in order."""
    term: Ints
    """Summand of each chosen row."""
    votes: list[Vote] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.plan)

    def members(self, group: int) -> Ints:
        """Return the rows of an identity, by rank."""
        stop = self.begin[group + 1] if group + 1 < len(self.begin) else len(self.order)
        return self.order[self.begin[group] : stop]

    def plan_of(self, group: int) -> Plan:
        return self.plans[int(self.plan[group])]

    @cached_property
    def first(self) -> Ints:
        """The chosen row of the lowest rank of each group."""
        found = np.full(len(self), -1, np.int64)
        found[self.group[::-1]] = self.chosen[::-1]
        return found

    def spot(self, group: int) -> tuple[str, str, str, str]:
        """Return phase, module, kind and path of a group."""
        return self.pieces.spots[int(self.pieces.spot[self.order[self.begin[group]]])]

    def where(self, test: npt.NDArray[np.bool_]) -> Ints:
        """Return the groups whose plans pass a test, given for each plan."""
        return np.flatnonzero(test[self.plan]) if len(self.plan) else np.empty(0, np.int64)

    def choose(self, group: int, row: int) -> None:
        """Let another replica stand for its set."""
        members = set(self.members(group).tolist())
        plan, own = self.plan_of(group), self.members(group).tolist().index(row)
        number = next(at for at, each in enumerate(plan.sets) if own in each)
        spots = np.flatnonzero(self.group == group)
        assert row in members
        self.chosen[spots[number]] = row
        vars(self).pop("first", None)

    def replace_plan(self, group: int, plan: Plan) -> None:
        """Give one group a plan of its own."""
        members = self.members(group)
        keep = self.group != group
        own = np.array([members[each[0]] for each in plan.sets], np.int64)
        self.plans.append(plan)
        self.plan[group] = len(self.plans) - 1
        group_of = np.concatenate([self.group[keep], np.full(len(own), group)])
        chosen = np.concatenate([self.chosen[keep], own])
        term = np.concatenate([self.term[keep], np.array(plan.terms, np.int64)])
        order = np.lexsort((np.arange(len(group_of)), group_of))
        self.group, self.chosen, self.term = group_of[order], chosen[order], term[order]
        vars(self).pop("first", None)


def lay_out(pieces: Pieces) -> Layout:
    """Return the layout of every identity of a run."""
    order = np.lexsort((pieces.place, pieces.identity))
    begin = np.flatnonzero(np.diff(pieces.identity[order], prepend=-1))
    size = np.diff(begin, append=len(order))
    signature = np.zeros(len(begin), np.uint64)
    if len(order):
        known = pieces.place * (len(pieces.placements) + 1) + pieces.placement + 1
        mixed = _mix(known * max(1, len(pieces.forms)) + pieces.form)
        signature = np.add.reduceat(mixed[order], begin)
    _, first, number = np.unique(signature, return_index=True, return_inverse=True)
    planner = _Planner(pieces)
    plans = [planner.plan(order[begin[group] : begin[group] + size[group]]) for group in first.tolist()]
    layout = Layout(pieces, plans, number.reshape(-1).astype(np.int64), begin, order, *(np.empty(0, np.int64),) * 3)
    _vote(layout, size)
    return layout


def _mix(numbers: Ints) -> npt.NDArray[np.uint64]:
    found = (numbers.astype(np.uint64) + np.uint64(1)) * _MIX
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = found ^ (found >> np.uint64(31))
    return mixed


class _Planner:
    """Works out plans from the placements of an identity's members."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._regions: dict[int, tuple[tuple[int, ...], Region]] = {}

    def plan(self, rows: Ints) -> Plan:
        pieces = self._pieces
        places = tuple(pieces.place[rows].tolist())
        numbers = pieces.placement[rows].tolist()
        if -1 in numbers:
            return self._unplaced(places, rows)
        placements = [pieces.placements[number] for number in numbers]
        shapes = {placement.shape for placement in placements}
        if len(shapes) > 1:
            one, other = sorted(shapes)[:2]
            why = f"its ranks take the whole to be {_words(one)} and {_words(other)}"
            return self._unknown(places, rows, why)
        reductions = dict(item for placement in placements for item in placement.partials.items())
        if other := [name for name in reductions.values() if name not in _KNOWN_REDUCTIONS]:
            return self._unknown(places, rows, f"it waits for a reduction by {other[0]}")
        if len({placement.flat for placement in placements}) > 1:
            return self._unknown(places, rows, "some ranks hold ranges of flat positions and others blocks")
        return self._placed(places, numbers, placements, reductions)

    def _placed(
        self, places: tuple[int, ...], numbers: Sequence[int], placements: list[Placement], reductions: dict[str, str]
    ) -> Plan:
        pieces, axes = self._pieces, sorted(reductions)
        sets: dict[tuple[tuple[int, ...], Region], list[int]] = {}
        shape: tuple[int, ...] = ()
        for member, (place, number) in enumerate(zip(places, numbers, strict=True)):
            term = tuple(pieces.coordinate_of(place, axis) for axis in axes)
            shape, region = self._region(number)
            if region or not shape or 0 in shape:
                sets.setdefault((term, region), []).append(member)
        terms = sorted({term for term, _ in sets})
        coverings = [cover(shape, [region for each, region in sets if each == term]) for term in terms]
        sizes = [pieces.size(axis) or len({term[at] for term in terms}) for at, axis in enumerate(axes)]
        averaged = [size for axis, size in zip(axes, sizes, strict=True) if reductions[axis] != "sum"]
        chosen = sorted(sets, key=lambda each: (terms.index(each[0]), sets[each][0]))
        return Plan(
            places,
            placements[0].shape,
            tuple(tuple(sets[each]) for each in chosen),
            tuple(terms.index(term) for term, _ in chosen),
            max(coverings, key=lambda each: each.missing + each.doubled, default=cover(shape, [])),
            weight=float(1 / np.prod(averaged)) if averaged else 1.0,
            lacking=int(np.prod(sizes)) - len(terms) if axes else 0,
            reductions=tuple((axis, reductions[axis]) for axis in axes),
            flat=placements[0].flat,
            guessed=any(placement.guessed for placement in placements),
        )

    def _region(self, number: int) -> tuple[tuple[int, ...], Region]:
        if number not in self._regions:
            self._regions[number] = region_of(self._pieces.placements[number])
        return self._regions[number]

    def _unplaced(self, places: tuple[int, ...], rows: Ints) -> Plan:
        """Return the plan of members without a placement. One alone is the whole. Several may be replicas: that is
        known when their digests are."""
        if len(rows) == 1:
            return self._unknown(places, rows, "")
        if len({int(form) for form in self._pieces.form[rows]}) > 1:
            return self._unknown(places, rows, "its ranks hold tensors of different shapes, and no placement is known")
        return self._unknown(places, rows, "its ranks hold different values, and no placement is known")

    def _unknown(self, places: tuple[int, ...], rows: Ints, why: str) -> Plan:
        shape = self._pieces.forms[int(self._pieces.form[rows[0]])][1]
        whole: Region = (tuple((0, size) for size in shape),)
        same = len({int(form) for form in self._pieces.form[rows]}) == 1
        members = tuple(range(len(rows))) if same else (0,)
        return Plan(places, shape, (members,), (0,), cover(shape, [whole]), unknown=why)


def _words(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a scalar"


def _vote(layout: Layout, size: Ints) -> None:
    """Choose a row for each set of replicas, and note the sets that disagree. Members without a placement that agree
    are replicas."""
    pieces = layout.pieces
    chosen, group_of, term_of = [], [], []
    agreed: dict[int, int] = {}
    mostly = _is_mostly_replicated(layout)
    for number, plan in list(enumerate(layout.plans)):
        groups = np.flatnonzero(layout.plan == number)
        rows = layout.order[layout.begin[groups][:, None] + np.arange(len(plan.places))]
        digests = pieces.digest[rows]
        for members, term in zip(plan.sets, plan.terms, strict=True):
            own = digests[:, members]
            equal = (own == own[:, :1]).all(axis=1)
            taken = rows[:, members[0]].copy()
            for at in np.flatnonzero(~equal).tolist():
                if not plan.unknown or _is_replicated(pieces, rows[at, list(members)], mostly):
                    layout.votes.append(_count(int(groups[at]), rows[at, list(members)], own[at]))
                    taken[at] = layout.votes[-1].majority[0]
            chosen.append(taken)
            group_of.append(groups)
            term_of.append(np.full(len(groups), term))
            if plan.unknown and len(members) == len(plan.places):
                voted = {vote.group for vote in layout.votes}
                for at, group in enumerate(groups.tolist()):
                    if equal[at] or group in voted:
                        agreed[group] = number
    if not chosen:
        return
    order = np.lexsort((np.concatenate(term_of), np.concatenate(group_of)))
    layout.chosen = np.concatenate(chosen)[order]
    layout.group, layout.term = np.concatenate(group_of)[order], np.concatenate(term_of)[order]
    known: dict[int, int] = {}
    for group, number in agreed.items():
        if number not in known:
            known[number] = len(layout.plans)
            layout.plans.append(_as_replicas(layout.plans[number]))
        layout.plan[group] = known[number]


def _as_replicas(plan: Plan) -> Plan:
    return Plan(plan.places, plan.shape, plan.sets, plan.terms, plan.covering)


def _is_mostly_replicated(layout: Layout) -> bool:
    """Whether most parameters and buffers without a placement are the same on all ranks that have them."""
    pieces, equal, different = layout.pieces, 0, 0
    for number, plan in enumerate(layout.plans):
        if not plan.unknown or len(plan.places) == 1:
            continue
        groups = np.flatnonzero(layout.plan == number)
        rows = layout.order[layout.begin[groups][:, None] + np.arange(len(plan.places))]
        state = np.array([pieces.spots[spot][2] in _STATE for spot in pieces.spot[rows[:, 0]].tolist()], bool)
        same = (pieces.digest[rows] == pieces.digest[rows[:, :1]]).all(axis=1)
        equal += int((state & same).sum())
        different += int((state & ~same).sum())
    return equal > different


def _is_replicated(pieces: Pieces, rows: Ints, mostly: bool) -> bool:
    """Whether members without a placement, of one form, are replicas of which a few differ: parameters and buffers, if
    more than half of the members are equal, or if most others of the run are the same on all ranks."""
    if pieces.spots[int(pieces.spot[rows[0]])][2] not in _STATE:
        return False
    return mostly or bool(np.unique(pieces.digest[rows], return_counts=True)[1].max() * 2 > len(rows))


def _count(group: int, rows: Ints, digests: npt.NDArray[np.uint64]) -> Vote:
    values, counts = np.unique(digests, return_counts=True)
    most = values[counts == counts.max()]
    winner = next(digest for digest in digests if digest in most)
    return Vote(
        group,
        tuple(rows[digests == winner].tolist()),
        tuple(rows[digests != winner].tolist()),
        tied=len(most) > 1,
    )
