"""Names the ranks that differ where a joined record is wrong, if both sides were run by the same ranks."""

from __future__ import annotations

from dataclasses import replace

from tensortap.core.records import Comparison
from tensortap.store import Run

__all__ = ["with_differing_ranks"]


def with_differing_ranks(comparison: Comparison, reference: Run, candidate: Run) -> Comparison:
    """Return the comparison with a sentence that names the ranks to inspect, unless all of them differ.

    reference, candidate: the runs before their ranks were joined.
    """
    first = comparison.first
    if first is None or first.layout is not None or reference.ranks != candidate.ranks:
        return comparison
    pairs = [(rank, reference.get(first.key, rank), candidate.get(first.key, rank)) for rank in reference.ranks]
    known = [(rank, ours, theirs) for rank, ours, theirs in pairs if ours is not None and theirs is not None]
    differing = [rank for rank, ours, theirs in known if ours.summary.digest != theirs.summary.digest]
    if not differing or len(differing) == len(known):
        return comparison
    several = len(differing) > 1
    which = (
        f"ranks {', '.join(map(str, differing))} of {len(known)} differ"
        if several
        else (f"rank {differing[0]} of {len(known)} differs")
    )
    return replace(comparison, sentence=f"{comparison.sentence} Only {which} there.")
