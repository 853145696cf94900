"""Ranks that a comparison skips, because none of their records has a counterpart."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tensortap.compare.align.side import Ints, Side
from tensortap.compare.say.formatting import listed
from tensortap.store import Run

if TYPE_CHECKING:
    from tensortap.compare.matched import Matched

__all__ = ["UnpairedRanks", "other_worlds", "unchecked_ranks", "unpaired_ranks"]


@dataclass(frozen=True)
class UnpairedRanks:
    """Ranks that take part in a comparison and were not compared."""

    reference: tuple[int, ...] = ()
    candidate: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    """Ranks that the caller asked for and neither run has."""
    unseen: str = ""
    """Says that the runs had other numbers of ranks, of which some left no record; empty if the caller chose ranks."""

    def __bool__(self) -> bool:
        return bool(self.reference or self.candidate or self.absent or self.unseen)

    def in_words(self) -> str:
        """Name each of these ranks and its side.

        >>> UnpairedRanks(reference=(1, 2), candidate=(5,)).in_words()
        'ranks 1, 2 of the reference have no counterpart, and rank 5 of the candidate has no counterpart'
        """
        parts = [
            f"{_ranks(ranks)} of the {side} {'have' if len(ranks) > 1 else 'has'} no counterpart"
            for side, ranks in (("reference", self.reference), ("candidate", self.candidate))
            if ranks
        ]
        if self.absent:
            parts.append(f"neither run has {_ranks(self.absent)}")
        if self.unseen:
            parts.append(self.unseen)
        return ", and ".join(parts)

    def note(self) -> str:
        """Say what was not compared, and what to do."""
        advice = "select the ranks that both runs have with --rank (ranks= in Python) to judge only these"
        return f"not compared: {self.in_words()}; {advice}"

    def by_side(self) -> dict[str, list[int]]:
        return {"reference": list(self.reference), "candidate": list(self.candidate)}

    def compared(self, side: Side, name: str) -> int:
        """Count the records of one side that are on ranks with a counterpart."""
        return int(np.sum(~np.isin(side.rank, getattr(self, name))))


def unpaired_ranks(matched: Matched, asked: Collection[int] | Mapping[int, int] | None) -> UnpairedRanks:
    """Find the ranks that have records on one side and no pair. `asked` are the ranks that the caller selected.

    If no record at all has a counterpart, the names differ and not the ranks: then a rank that both sides have is not
    unpaired.
    """
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    ours = _without_pair(left, alignment.reference, alignment.only_reference)
    theirs = _without_pair(right, alignment.candidate, alignment.only_candidate)
    if not len(alignment.reference):
        counterpart = asked if isinstance(asked, Mapping) else {rank: rank for rank in (*ours, *theirs)}
        both = {(rank, other) for rank, other in counterpart.items() if rank in ours and other in theirs}
        ours = [rank for rank in ours if rank not in {one for one, _ in both}]
        theirs = [rank for rank in theirs if rank not in {other for _, other in both}]
    unseen = "" if asked is not None or ours or theirs else _unseen(left.run, right.run)
    return UnpairedRanks(tuple(ours), tuple(theirs), _absent(left.run.ranks, right.run.ranks, asked), unseen)


def other_worlds(reference: Run, candidate: Run) -> str:
    """Say that two recordings ran on other numbers of ranks; empty if not, or if a foreign file does not know it."""
    ours, theirs = (run.info.get("world", 1) for run in (reference, candidate))
    if ours == theirs or reference.info.get("format") != candidate.info.get("format"):
        return ""
    return f"the reference ran on {ours:,} rank{'s' * (ours > 1)} and the candidate on {theirs:,}"


def _unseen(reference: Run, candidate: Run) -> str:
    lacking = [max(0, run.info.get("world", 1) - len(run.ranks)) for run in (reference, candidate)]
    worlds = other_worlds(reference, candidate)
    if not worlds or not any(lacking):
        return ""
    parts = [
        f"{count:,} of the {side}" for count, side in zip(lacking, ("reference", "candidate"), strict=True) if count
    ]
    return f"{worlds}, and {' and '.join(parts)} left no record"


def unchecked_ranks(reference: Run, candidate: Run) -> str:
    """Name the reference's ranks that no process of a check stands for; empty if there is none."""
    world = max(candidate.info.get("world", 1), *(rank + 1 for rank in candidate.ranks))
    ranks = [rank for rank in reference.ranks if rank >= world]
    if not ranks:
        return ""
    return f"{_ranks(ranks)} of the reference {'were' if len(ranks) > 1 else 'was'} not checked"


def _without_pair(side: Side, paired: Ints, alone: Ints) -> list[int]:
    found: list[int] = np.setdiff1d(side.rank[alone], side.rank[paired]).tolist()
    return found


def _absent(
    ours: Collection[int], theirs: Collection[int], asked: Collection[int] | Mapping[int, int] | None
) -> tuple[int, ...]:
    wanted = asked if isinstance(asked, Mapping) else {rank: rank for rank in asked or ()}
    return tuple(rank for rank, other in wanted.items() if rank not in ours and other not in theirs)


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(tuple(ranks))}"
