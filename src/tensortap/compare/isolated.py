"""Findings of a run whose modules were all fed from the reference: nothing is handed on, so each fault is its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge import Judgement
from tensortap.compare.structure import Structure
from tensortap.compare.verdict import Place, place_of
from tensortap.records import Difference, Finding, Key

__all__ = ["Callers", "isolated_findings"]

Callers = Mapping[tuple[int, int, str, int], str | None]
"""By step, micro step, module and call: the module whose code made the call; None from outside the model."""


def isolated_findings(
    judgement: Judgement,
    structure: Structure,
    forced: npt.NDArray[np.bool_],
    own: Collection[int],
    callers: Callers,
    key: Callable[[int], Key],
    cls: Callable[[int], str],
    difference: Callable[[int], Difference | None],
) -> dict[int, Finding]:
    """For each module at fault, on each rank, the earliest row that shows it. `own` are gradients at an output to which
    the module itself has added."""
    rows = sorted(judgement.born, key=lambda row: (structure.scope[row][1], structure.seq[row]))
    found: dict[int, Finding] = {}
    known: set[tuple[int, str]] = set()
    for born in rows:
        at_root = structure.at_root(born) if structure.kind[born] == "grad_output" else None
        row = born if at_root is None else at_root
        place = Place(None, True) if row in own else _place(row, structure, judgement, forced, callers)
        module = structure.module[row] if place.container is None else place.container
        rank = structure.scope[row][0]
        if (rank, module) in known:
            continue
        known.add((rank, module))
        found[row] = Finding(
            key=key(row),
            rank=rank,
            cls=cls(row),
            status=judgement.status[row],
            difference=difference(row),
            tolerance=float(judgement.tolerance[row]),
            rule=judgement.rule[row],
            inputs_matched=place.inputs_matched,
            container=place.container if place.container != structure.module[row] else None,
            inputs_rel_l2=judgement.sources_error[born],
        )
    return found


def _place(
    row: int, structure: Structure, judgement: Judgement, forced: npt.NDArray[Any], callers: Callers
) -> Place:
    """Whose doing a wrong row is. What goes into a module, or comes back to it, was made by the code that called it."""
    kind, call = structure.kind[row], structure.call_of(row)
    if call is None or kind not in ("input", "grad_output"):
        return place_of(row, structure, judgement)
    _, step, micro = call.scope
    caller = callers.get((step, micro, call.module, call.number))
    if kind == "input":
        return Place(caller, None if caller is None else True)
    # A user of the output whose own gradient was not replaced may have sent the wrong one just as well.
    unforced = [user for user in structure.users(row, call) if not any(forced[r] for r in user.of("grad_input"))]
    if unforced or caller is None:
        return place_of(row, structure, judgement)
    return Place(caller, True)
