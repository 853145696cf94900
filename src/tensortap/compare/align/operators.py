"""Pair the operators of two runs, whose code may differ: an operator may have another line or count on one side.

Operators of one call are aligned as sequences: by their values where these are equal, else by name, shape and line. An
added operator then shifts no other. Calls of modules inside are part of the sequence, so that an operator before one is
not taken for one after it. Gradients follow the operators of the forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Ints, Names, Side
from tensortap.core.operator_paths import OperatorPath, parse_operator
from tensortap.core.sequences import best_alignment

__all__ = ["OperatorAlignment", "OperatorCall", "align_operators"]

_ADDED = "+"
"""Begins the path of an operator that only the candidate has, so that it matches none of the reference."""
_SAME_VALUE, _SAME_NAME, _SAME_SHAPE, _SAME_PLACE = 16, 4, 2, 1
_SAME_MODULE = 8
_REPLACED = 1
"""Score of two operators with other names that make the same shape on the same line."""


_CALL = 0
"""Stands for the count of an operator in the entry of a call."""


class OperatorCall(NamedTuple):
    """A call of a module, whose operators are aligned with each other. Numbers and names are the reference's."""

    rank: int
    step: int
    micro: int
    module: str
    call: int


@dataclass
class OperatorAlignment:
    """The operators of two runs after alignment."""

    own_paths: Names | None = None
    """The candidate's own paths; None if neither side has operators."""
    only_reference: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    only_candidate: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Rows of operators that one side alone has, in calls whose operators both recorded."""
    uncompared: tuple[int, int] = (0, 0)
    """How many records of operators each side has in calls of which the other recorded none."""

    def without_added(self, alignment: Alignment) -> Alignment:
        """Return the alignment without operators that one side alone has, and take note of these.

        Another way to compute the same values is no record that is missing.
        """
        if self.own_paths is None:
            return alignment
        gone_left, gone_right = self._rows
        mine, theirs = (_both(alignment.only_reference, gone_left), _both(alignment.only_candidate, gone_right))
        here, there = (
            np.array([row in of for row in rows.tolist()], bool)
            for rows, of in zip((mine, theirs), self._shared, strict=True)
        )
        self.only_reference, self.only_candidate = mine[here], theirs[there]
        self.uncompared = int((~here).sum()), int((~there).sum())
        return replace(
            alignment,
            only_reference=np.setdiff1d(alignment.only_reference, mine),
            only_candidate=np.setdiff1d(alignment.only_candidate, theirs),
        )

    _rows: tuple[Ints, Ints] = field(default_factory=lambda: (np.empty(0, np.int64), np.empty(0, np.int64)))
    """All rows of operators of each side."""
    _shared: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    """Rows of each side in calls whose operators both sides recorded."""


def align_operators(
    reference: Side,
    candidate: Side,
    rename: Callable[[str], str] | None,
    steps: Mapping[int, int] | None,
    ranks: Mapping[int, int] | None,
) -> OperatorAlignment:
    """Give each operator of the candidate the path of its counterpart in the reference."""
    if not _has(reference) or not _has(candidate):
        return OperatorAlignment()
    own = candidate.path
    ours = _calls(reference, lambda name: name, {}, {})
    theirs = _calls(candidate, rename or (lambda name: name), _back(ranks), _back(steps))
    renamed: dict[int, str] = {}
    calls_inside = _CallsInside(reference, lambda name: name), _CallsInside(candidate, rename or (lambda name: name))
    shared: tuple[set[int], set[int]] = (set(), set())
    for call, rows in theirs.items():
        counterparts = ours.get(call)
        if counterparts is None:
            continue
        shared[0].update(counterparts)
        shared[1].update(rows)
        only = call._replace(call=1) not in ours and call._replace(call=1) not in theirs
        inside = (
            calls_inside[0].within(reference, counterparts, call, only),
            calls_inside[1].within(candidate, rows, call, only),
        )
        renamed |= _aligned(reference, counterparts, candidate, rows, inside)
    candidate.path = _with(own, renamed)  # a cached column
    everything = tuple(np.flatnonzero(side.kind.among(("operator",))) for side in (reference, candidate))
    return OperatorAlignment(own, _rows=everything, _shared=shared)  # type: ignore[arg-type]


def _has(side: Side) -> bool:
    return len(side) > 0 and "operator" in side.kind.words


def _back(mapping: Mapping[int, int] | None) -> dict[int, int]:
    return {} if mapping is None else {theirs: ours for ours, theirs in mapping.items()}


def _both(rows: Ints, wanted: Ints) -> Ints:
    return np.intersect1d(rows, wanted)


def _calls(
    side: Side, rename: Callable[[str], str], ranks: Mapping[int, int], steps: Mapping[int, int]
) -> dict[OperatorCall, list[int]]:
    found: dict[OperatorCall, list[int]] = defaultdict(list)
    for row in np.flatnonzero(side.kind.among(("operator",))).tolist():
        rank, step = int(side.rank[row]), int(side.step[row])
        call = OperatorCall(
            ranks.get(rank, rank),
            steps.get(step, step),
            int(side.micro[row]),
            rename(side.module[row]),
            int(side.call[row]),
        )
        found[call].append(row)
    return found


class _CallsInside:
    """The outputs of modules, which show where in a call's code they were called."""

    def __init__(self, side: Side, rename: Callable[[str], str]) -> None:
        self._rename = rename
        self._rows: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row in np.flatnonzero(side.kind.among(("output",)) & side.phase.among(("forward",))).tolist():
            self._rows[int(side.rank[row]), int(side.step[row]), int(side.micro[row])].append(row)

    def within(self, side: Side, operators: Sequence[int], call: OperatorCall, only: bool) -> dict[str, int]:
        """Return the rows of a call, by the names of the modules inside it.

        `only`: whether it is the module's only call. Otherwise they are those between its operators.
        """
        own = [row for row in operators if side.phase[row] == "forward"]
        if not own:
            return {}
        first, last = (int(side.seq[row]) for row in (own[0], own[-1]))
        scope = int(side.rank[own[0]]), int(side.step[own[0]]), int(side.micro[own[0]])
        prefix = f"{call.module}." if call.module else ""
        found: dict[str, int] = {}
        for row in self._rows[scope]:
            name = self._rename(side.module[row])
            inside = name.startswith(prefix) and name != call.module
            if inside and (only or first < int(side.seq[row]) < last):
                found.setdefault(f"{name} {int(side.call[row])}", row)
        return found


def _aligned(
    reference: Side,
    ours: Sequence[int],
    candidate: Side,
    theirs: Sequence[int],
    inside: tuple[Mapping[str, int], Mapping[str, int]],
) -> dict[int, str]:
    """Return new paths of the candidate's rows, where they change. `inside`: outputs of modules that both call."""
    if [reference.path[row] for row in ours] == [candidate.path[row] for row in theirs]:
        return {}
    left, right = _operators(reference, ours), _operators(candidate, theirs)
    forward: dict[OperatorPath, OperatorPath | None] = {}
    for phase in ("forward", "backward"):
        mine = {operator: row for (own, operator), row in left.items() if own == phase}
        other = {operator: row for (own, operator), row in right.items() if own == phase and operator not in forward}
        if phase == "backward":  # operators whose forward was not recorded, as in a recomputation
            mine = {operator: row for operator, row in mine.items() if operator not in forward.values()}
        if phase == "forward":
            mine, other = _with_calls(reference, mine, inside[0]), _with_calls(candidate, other, inside[1])
        names = list(mine), list(other)
        for one, two in best_alignment(_scores(reference, mine, candidate, other)):
            if two is not None:
                forward[names[1][two]] = None if one is None else names[0][one]
    found = {}
    for row in theirs:
        path = parse_operator(candidate.path[row])
        counterpart = forward[path.operator]
        if counterpart is None:
            found[row] = f"{_ADDED}{path}"
        elif counterpart != path.operator:
            found[row] = str(counterpart._replace(part=path.part, again=path.again, gradient=path.gradient))
    return found


def _with_calls(
    side: Side, operators: Mapping[OperatorPath, int], inside: Mapping[str, int]
) -> dict[OperatorPath, int]:
    """Return operators and calls of modules inside, in execution order. A call is an operator without a count."""
    both = [*operators.items(), *((OperatorPath(name, "", _CALL), row) for name, row in inside.items())]
    return dict(sorted(both, key=lambda each: int(side.seq[each[1]])))


def _operators(side: Side, rows: Iterable[int]) -> dict[tuple[str, OperatorPath], int]:
    """Return the first row of each operator, by phase, in execution order."""
    found: dict[tuple[str, OperatorPath], int] = {}
    for row in rows:
        found.setdefault((side.phase[row], parse_operator(side.path[row]).operator), row)
    return found


def _scores(
    reference: Side, ours: Mapping[OperatorPath, int], candidate: Side, theirs: Mapping[OperatorPath, int]
) -> Ints:
    """Return how well each operator of the reference matches each of the candidate."""
    left, right = list(ours.values()), list(theirs.values())

    def same(one: Iterable[object], two: Iterable[object]) -> Ints:
        known: dict[object, int] = {}
        codes = [np.array([known.setdefault(each, len(known)) for each in side], np.int64) for side in (one, two)]
        return np.asarray(codes[0][:, None] == codes[1][None, :], np.int64)

    value = same(reference.digest[left].tolist(), candidate.digest[right].tolist())
    shape = same(reference.shape_hash[left].tolist(), candidate.shape_hash[right].tolist())
    name = same((each.name for each in ours), (each.name for each in theirs))
    # Files of two sides may have other names.
    place = same((each.place.rpartition(":")[2] for each in ours), (each.place.rpartition(":")[2] for each in theirs))
    alike = _SAME_NAME + _SAME_SHAPE * shape + _SAME_PLACE * place
    found: Ints = np.where(name > 0, alike, _REPLACED * shape * place) + _SAME_VALUE * value * shape
    called = [np.array([each.nth == _CALL for each in side], bool) for side in (ours, theirs)]
    if called[0].any() or called[1].any():
        either, both = called[0][:, None] | called[1][None, :], called[0][:, None] & called[1][None, :]
        found = np.where(either, np.where(both, _SAME_MODULE * name, 0), found)
    return found


def _with(names: Names, renamed: Mapping[int, str]) -> Names:
    """Return a column with other words in some rows."""
    if not renamed:
        return names
    words = {word: code for code, word in enumerate(names.words)}
    codes = np.array(names.codes, np.int64)
    for row, word in renamed.items():
        codes[row] = words.setdefault(word, len(words))
    return Names(codes, list(words))
