"""Findings for parameters that get a gradient in the candidate alone, while all pairs may be right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tensortap.compare.judge.counterparts import Counterparts
from tensortap.compare.judge.missing_rows import ran_on_both
from tensortap.compare.judge.structure import Structure
from tensortap.compare.matched import Matched
from tensortap.core.causes import Cause
from tensortap.core.records import Finding, Key

__all__ = ["extra_rows", "find_extra_gradients"]

_MOST = 1000


def find_extra_gradients(
    matched: Matched, structure: Structure, explained: bool = False
) -> dict[tuple[int, float], Finding]:
    """Find parameters that get a gradient only in the candidate, while their module ran on both sides and others got
    theirs. There is one finding a module. Keys are its step and its position in the reference's order.

    explained: whether other findings tell why something is used that the reference's model does not use. Then modules
    that are sent no gradient in the reference are right.
    """
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    order = np.argsort(alignment.candidate)
    found: dict[tuple[int, float], Finding] = {}
    named: set[tuple[int, str]] = set()
    for row, rank, key in extra_rows(matched, structure):
        calls = structure.calls_of_module.get(((rank, key.step, key.micro), key.module), ())
        if explained and not any(call.of("grad_output") for call in calls):
            continue
        if not matched.is_certain(key.module) or (rank, key.module) in named:
            continue
        if len(named) == _MOST:
            break
        named.add((rank, key.module))
        after = int(np.searchsorted(alignment.candidate[order], row))
        before = -1.0 if not after else float(left.seq[alignment.reference[order[after - 1]]])
        place = key.step, before + 0.5 + len(found) * 1e-6  # after the records before it on the candidate's side
        found[place] = Finding(
            key=key,
            rank=rank,
            cls=right.cls[row],
            status="extra",
            cause=Cause.EXTRA_GRADIENT,
            difference=None,
            tolerance=0.0,
            rule="the reference has none",
            inputs_matched=True,
            counterpart=matched.names.get(key.module),
        )
    return found


def extra_rows(matched: Matched, structure: Structure) -> Iterator[tuple[int, int, Key]]:
    """Yield the candidate's parameter gradients that the reference should have and lacks: row, rank, and identity in
    the reference's names."""
    left, right, alone = matched.reference, matched.candidate, matched.alignment.only_candidate
    if not len(alone):
        return
    rows = alone[right.kind.among(("param_grad",))[alone]]
    counterparts = Counterparts(matched)
    unfinished = None if left.run.finished else int(left.step.max(initial=-1))
    came = {scope for scope, kind in zip(structure.scope, structure.kind, strict=True) if kind == "param_grad"}
    for row in rows.tolist():
        if (place := counterparts.extra(row)) is None:
            continue
        rank, key = place
        scope = rank, key.step, key.micro
        if key.step != unfinished and scope in came and ran_on_both(matched, structure, scope, key):
            yield row, rank, key
