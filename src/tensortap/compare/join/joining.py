"""Join the ranks of two runs before they are aligned, and report what could not be joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tensortap.compare.align.alignment import Alignment, Renames
from tensortap.compare.align.side import Side
from tensortap.compare.join.accumulated import without_accumulated
from tensortap.compare.join.layout import Plan
from tensortap.compare.join.micro import batches_of, join_micro_batches, steps_split_otherwise
from tensortap.compare.join.pieces import Ints, read_pieces
from tensortap.compare.join.resolve import OtherSide, key_of, resolve
from tensortap.compare.join.source import JoinedSource, joined_source
from tensortap.compare.options import ComparisonOptions
from tensortap.core.records import Key
from tensortap.store import Run
from tensortap.store.format import RUN_FORMAT

__all__ = ["NOT_JOINED", "Joining", "Unjoined", "join_runs"]


@dataclass(frozen=True)
class Unjoined:
    """A record of a whole tensor that its ranks do not make up."""

    side: str
    key: Key
    cls: str
    ranks: tuple[int, ...]
    plan: Plan
    recorded: bool
    """Whether all ranks of the run were recorded, so that the layout itself is wrong."""

    @property
    def why(self) -> str:
        """The reason, without a full stop."""
        plan, covering = self.plan, self.plan.covering
        if plan.unknown:
            return plan.unknown
        if plan.lacking:
            return f"{plan.lacking:,} of its summands along {plan.reductions[0][0]} were not recorded"
        if covering.doubled:
            return f"{covering.doubled:,} of its {covering.elements:,} elements are held by several ranks"
        return f"{covering.missing:,} of its {covering.elements:,} elements are held by no rank"


@dataclass(frozen=True)
class Joining:
    """The result of joining the ranks of two runs."""

    sides: dict[str, JoinedSource] = field(default_factory=dict)
    """The joined sides, by "reference" and "candidate"."""
    unseen: dict[str, list[Key]] = field(default_factory=dict)
    """Gradients from backward that a side did not record, while it recorded what the optimizer got."""
    accumulated: list[Key] = field(default_factory=list)
    """Gradients of single micro batches that one side has only as a sum, while both have what the optimizer got."""

    def __bool__(self) -> bool:
        return bool(self.sides)

    def unjoined(self) -> Iterator[Unjoined]:
        """Yield the records that could not be joined, by side."""
        for side, joined in self.sides.items():
            layout = joined.layout
            bad = [bool(plan.unknown) or not plan.covering.once or plan.lacking > 0 for plan in layout.plans]
            for group in layout.where(np.array(bad, bool)).tolist():
                plan = layout.plan_of(group)
                ranks = tuple(layout.pieces.rank[layout.members(group)].tolist())
                yield Unjoined(side, Key(*key_of(layout, group)), "", ranks, plan, joined.is_recorded)

    def without_unjoined(self, reference: Side, candidate: Side, alignment: Alignment) -> Alignment:
        """Return the alignment without one-sided records whose counterpart could not be joined: it is not missing.

        It also lacks gradients of single micro batches that one side does not show.
        """
        keys: dict[str, set[Key]] = {"reference": set(), "candidate": set()}
        for each in self.unjoined():
            keys[each.side].add(each.key)
        self.unseen["candidate"] = _unseen_gradients(reference, alignment.only_reference, candidate)
        self.unseen["reference"] = _unseen_gradients(candidate, alignment.only_candidate, reference)
        alignment, self.accumulated[:] = without_accumulated(reference, candidate, alignment)
        return replace(
            alignment,
            only_reference=_without(
                reference, alignment.only_reference, keys["candidate"] | {*self.unseen["candidate"]}
            ),
            only_candidate=_without(
                candidate, alignment.only_candidate, keys["reference"] | {*self.unseen["reference"]}
            ),
        )


NOT_JOINED = Joining()


def _unseen_gradients(side: Side, only: Ints, other: Side) -> list[Key]:
    """Return the gradients from backward that only one side has, of parameters whose optimizer got one on the other.

    A wrapper that flattens parameters shows the gradients of single ones only after their reduction, and so does one
    that divides them, if it reduces the gradients of several micro batches together.
    """
    alone = only[side.kind.among(("param_grad",))[only]]
    if not len(alone):
        return []
    got = np.flatnonzero(other.kind.among(("step_grad",)))
    known = {(int(other.step[row]), other.module[row], other.path[row]) for row in got.tolist()}
    keys = (side.key(row) for row in alone.tolist())
    return [key for key in keys if (key.step, key.module, key.path) in known]


def _without(side: Side, rows: Ints, keys: set[Key]) -> Ints:
    if not keys:
        return rows
    return np.array([row for row in rows.tolist() if side.key(row) not in keys], np.int64)


def join_runs(reference: Run, candidate: Run, options: ComparisonOptions, renames: Renames) -> tuple[Run, Run, Joining]:
    """Return both runs with the records of their ranks joined to those of whole tensors, where that is necessary.

    Ranks that the caller selected are compared one by one, and so are runs of the same number of ranks without
    placements.
    """
    if options.ranks is not None or not (_needs_joining(reference, candidate) or _needs_joining(candidate, reference)):
        return reference, candidate, NOT_JOINED
    sides = _joined_sides(reference, candidate)
    runs = {name: Run(source) for name, source in sides.items()}
    if options.mapping is None:
        # Each side knows the other's names: the candidate's are renamed to the reference's.
        back = _back(renames, sides["candidate"]) if renames else None
        resolve(sides["candidate"], OtherSide(runs["reference"], back))
        resolve(sides["reference"], OtherSide(runs["candidate"], renames if renames else None))
    return runs["reference"], runs["candidate"], Joining(sides)


def _joined_sides(reference: Run, candidate: Run) -> dict[str, JoinedSource]:
    """Return both sides joined; also micro batches that only one of them has, if the bytes are there."""
    runs = {"reference": reference, "candidate": candidate}
    pieces = {name: read_pieces(run) for name, run in runs.items()}
    batches = {name: batches_of(each) for name, each in pieces.items()}
    steps = steps_split_otherwise(*batches.values())
    if not steps or not all(each.kept.all() for each in pieces.values()):
        return {name: JoinedSource(run, pieces[name]) for name, run in runs.items()}

    def joined(rank_first: bool) -> dict[str, JoinedSource]:
        found = {}
        for name, run in runs.items():
            several = {step for step in steps if len(batches[name][step]) > 1}
            own, moved = pieces[name], np.empty(0, np.int64)
            if several:
                own, moved = join_micro_batches(own, batches[name], several, rank_first)
            found[name] = JoinedSource(run, own)
            found[name].without_positions_of(moved)
        return found

    sides = joined(rank_first=False)
    if _have_equal_inputs(sides):
        return sides
    other = joined(rank_first=True)
    return other if _have_equal_inputs(other) else sides


def _have_equal_inputs(sides: Mapping[str, JoinedSource]) -> bool:
    """Whether the models of both sides were given the same rows in the same order, in the first common step."""
    ours, theirs = (
        {record.key: record for record in Run(source).records(kind="input", module="", phase="forward")}
        for source in sides.values()
    )
    common = next((key for key in ours if key in theirs), None)
    if common is None:
        return True
    left, right = (Run(source).load(own[common]) for source, own in zip(sides.values(), (ours, theirs), strict=True))
    return left.shape == right.shape and left.tobytes() == right.tobytes()


def _back(renames: Renames, candidate: JoinedSource) -> Callable[[str], str]:
    """Return the candidate's name of a module by the reference's."""
    names = {spot[1] for spot in candidate.layout.pieces.spots}
    return partial(_looked_up, {renames(name): name for name in names})


def _looked_up(names: dict[str, str], name: str) -> str:
    return names.get(name, name)


def _needs_joining(run: Run, other: Run) -> bool:
    if joined_source(run) is not None or run.is_checkpoint:
        return False
    if any(len(run.placements(rank)) for rank in run.ranks):
        return True
    if run.info.get("format", RUN_FORMAT) != RUN_FORMAT:  # nothing says that the ranks of a dump share one model
        return False
    worlds = [max(each.info.get("world") or 1, len(each.ranks)) for each in (run, other)]
    return len(run.ranks) > 1 and worlds[0] != worlds[1]
