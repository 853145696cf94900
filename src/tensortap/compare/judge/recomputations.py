"""Recomputations of the candidate that made other values than its own first forward; capture compares the two."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tensortap.compare.align.side import Side
from tensortap.compare.matched import Matched
from tensortap.core.causes import Cause
from tensortap.core.records import Finding, Key
from tensortap.store.loop import LoopFact

__all__ = ["FACT", "changed_recomputations", "find_recomputations", "key_of"]

FACT = "recomputation"


def changed_recomputations(side: Side) -> Iterator[tuple[int, LoopFact]]:
    """Yield rank and fact of each module whose recomputation makes other values, among the steps that take part."""
    for rank in side.ranks:
        steps = set(side.step[side.rank == rank].tolist())
        facts = side.run.loop(rank)
        for module in facts.subjects(FACT):
            for fact in facts.changes(FACT, module)[:1]:
                if fact.step in steps:
                    yield rank, fact


def key_of(fact: LoopFact, rename: dict[str, str] | None = None) -> Key:
    """Return the value that differs: the record of the first forward."""
    value = fact.value
    module = str(value.get("module", fact.of))
    return Key(
        fact.step,
        int(value.get("micro", 0)),
        "forward",
        (rename or {}).get(module, module),
        int(value.get("call", 0)),
        str(value.get("kind", "output")),
        str(value.get("path", "0")),
    )


def find_recomputations(matched: Matched) -> dict[tuple[int, float], Finding]:
    """Return a finding for each module that recomputes other values in the candidate alone, by step and position."""
    left, right = matched.reference, matched.candidate
    known = {fact.of for _, fact in changed_recomputations(left)}
    names = {theirs: ours for ours, theirs in matched.settings.modules()}
    found: dict[tuple[int, float], Finding] = {}
    for rank, fact in changed_recomputations(right):
        blamed = names.get(fact.of, fact.of)
        if blamed in known:
            continue
        key = key_of(fact, names)
        backward = left.seq[left.phase.among(("backward",)) & (left.step == fact.step)]
        position = float(backward.min(initial=np.iinfo(np.int64).max)) - 1 + 1e-3 * (len(found) + 1)
        cls = left.cls[int(np.flatnonzero(left.module.among((blamed,)))[0])] if blamed in left.module.words else ""
        found[fact.step, position] = Finding(
            key=key,
            rank=rank,
            cls=cls,
            status="recomputed",
            cause=Cause.RECOMPUTATION,
            difference=None,
            tolerance=0.0,
            rule="a recomputation repeats the first forward",
            inputs_matched=True,
            container=blamed if blamed != key.module else None,
        )
    return found
