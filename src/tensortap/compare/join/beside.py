"""Metadata of a run of whole tensors: loop facts, plain arguments and coverage of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tensortap.core.records import Coverage
from tensortap.store.calls import Calls
from tensortap.store.loop import LoopFact, LoopFacts

__all__ = ["joined_calls", "joined_coverage", "joined_loop"]


def joined_loop(ranks: Iterable[LoopFacts | None]) -> LoopFacts | None:
    """Return the loop facts of the first rank, with the parameters and modules that only other ranks have."""
    known = [facts for facts in ranks if facts is not None]
    if not known:
        return None
    joined = _JoinedFacts()
    for facts in known:
        for fact in facts:
            joined.take(fact)
    return joined


class _JoinedFacts(LoopFacts):
    """Facts that are read already, of several ranks."""

    def take(self, fact: LoopFact) -> None:
        spot = fact.fact, fact.of
        own = self._found.setdefault(spot, [])
        same = [at for at, each in enumerate(own) if each.step == fact.step]
        if not same and (not own or own[-1].step < fact.step):
            own.append(fact)
        elif same and (fact.fact == "parameters" or "no_gradient" in fact.value):
            own[same[0]] = own[same[0]]._replace(value=_united(own[same[0]].value, fact.value))


def _united(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return both values; lists of names are joined."""
    found = {**other, **one}
    for name in ("names", "no_gradient"):
        if name in one and name in other:
            found[name] = tuple(dict.fromkeys([*one[name], *other[name]]))
    return found


def joined_calls(ranks: Iterable[Calls | None]) -> Calls | None:
    """Return the plain arguments of each module, from the first rank that has it."""
    known = [calls for calls in ranks if calls is not None]
    if not known:
        return None
    joined = Calls()
    seen: set[str] = set()
    for calls in known:
        new = set()
        for call in calls:
            if call.module not in seen:
                joined.add(call)
                new.add(call.module)
        seen |= new
    return joined


def joined_coverage(ranks: Mapping[int, Iterable[Coverage]]) -> list[Coverage]:
    """Return the coverage of each module, from the first rank that saw it, or else from the first that lists it."""
    found: dict[str, Coverage] = {}
    for rank in sorted(ranks):
        for row in ranks[rank]:
            if row.module not in found or (found[row.module].status != "seen" and row.status == "seen"):
                found[row.module] = row
    return list(found.values())
