"""Findings for gradients that only the reference has, while all pairs may be right."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from tensortap.compare.judge.counterparts import Counterparts, Pass, pass_of
from tensortap.compare.judge.detached import DetachedKeys, knows_detached
from tensortap.compare.judge.extra_gradients import extra_rows
from tensortap.compare.judge.gradient_ends import find_cuts, find_ends, missing_finding, names_around
from tensortap.compare.judge.isolation import CallersInStructure, Isolation
from tensortap.compare.judge.judging import CallsWithoutGradient
from tensortap.compare.judge.loss_terms import lost_terms
from tensortap.compare.judge.missing_rows import (
    Parameters,
    is_expected,
    lacks_its_value,
    missing_rows,
    of_certain_modules,
    unfinished_step,
)
from tensortap.compare.judge.steps.calls import Spot
from tensortap.compare.judge.structure import Structure
from tensortap.compare.matched import Matched
from tensortap.core.causes import UNCALLED, Cause
from tensortap.core.records import Finding, Key

__all__ = [
    "find_calls_without_gradient",
    "find_lost_term",
    "find_missing_gradients",
    "find_missing_in_isolation",
    "find_uncalled_modules",
    "find_uncertain_modules",
    "without_reordered",
]


def find_missing_in_isolation(
    matched: Matched,
    structure: Structure,
    isolation: Isolation,
    parameters: Parameters,
    wrong: Collection[str] = (),
) -> dict[int, Finding]:
    """Find where gradients end in a run on the reference's own inputs. Keys are the reference's rows.

    wrong: modules whose own code makes something wrong of values, which may be why it sends nothing back for some.
    """
    side = matched.reference
    unfinished = unfinished_step(matched)
    alone = [(row, side.key(row)) for row in matched.alignment.only_reference.tolist()]
    # A value of another shape, or with tokens in another order, is not replaced, and its gradient is not compared.
    unreplaced = {*np.flatnonzero(matched.measures.reshaped).tolist(), *matched.measures.reordered}
    lost = {key for _, key in alone} | _keys_of(matched, unreplaced)
    missing = [(row, key) for row, key in alone if key.step != unfinished and is_expected(key, parameters)]
    further = _called_further(matched)
    missing = [(row, key) for row, key in missing if not lacks_its_value(key, lost)]
    missing = [
        (row, key)
        for row, key in missing
        if (key.step, key.micro, key.module) not in further or key.kind == "param_grad"
    ]
    missing = [(row, key) for row, key in missing if not isolation.keeps_gradient(key)]
    cuts = find_cuts(matched, structure, isolation, missing)
    return cuts or find_ends(matched, structure, isolation, missing, wrong=wrong)


def without_reordered(keys: Collection[Key], matched: Matched) -> set[Key]:
    """Return the keys without gradients of values that a check did not replace, as their tokens are in another order:
    these are not compared."""
    values = _keys_of(matched, matched.measures.reordered)
    return {key for key in keys if key.phase != "backward" or not lacks_its_value(key, values)}


def _keys_of(matched: Matched, pairs: Collection[int]) -> set[Key]:
    return {matched.reference.key(row) for row in matched.alignment.reference[list(pairs)].tolist()}


def _called_further(matched: Matched) -> set[tuple[int, int, str]]:
    """Return the modules that the candidate calls more often than the reference, with step and micro step.

    They may return the same each time, as a parametrized weight that is read twice. The gradient then comes to the call
    whose value is used, and that need not be one that the reference makes.
    """
    side, alone = matched.candidate, matched.alignment.only_candidate
    keys = map(side.key, alone[side.kind.among(("output",))[alone]].tolist())
    return {(key.step, key.micro, key.module) for key in keys if key.call}


def find_lost_term(matched: Matched, parameters: Parameters) -> dict[int, Finding]:
    """Find a term of the loss that the model returns, and that gets no gradient. Keys are the reference's rows.

    Code outside the model may leave it out, so that no gradient ends inside.
    """
    side, is_term, unfinished = matched.reference, lost_terms(matched), unfinished_step(matched)
    alone = [(row, side.key(row)) for row in matched.alignment.only_reference.tolist()]
    lost = {key for _, key in alone}
    for row, key in alone:
        if key.step == unfinished or not is_expected(key, parameters) or lacks_its_value(key, lost):
            continue
        if is_term(row, key):
            return {row: missing_finding(matched, row, key, None)}
    return {}


def find_calls_without_gradient(matched: Matched, structure: Structure, free: bool = True) -> CallsWithoutGradient:
    """Find calls that lack a gradient where the reference has one, while others come in the same pass.

    In a `free` run, return them only if `find_missing_gradients` reports them: nothing else would.
    """
    if not len(matched.alignment.only_reference):
        return CallsWithoutGradient()
    expected = Counterparts(matched).expected if free else None
    rows = missing_rows(matched, structure, None, ("grad_output", "grad_input"), expected)
    missing = of_certain_modules(matched, rows)

    def lacking(kind: str) -> frozenset[Spot]:
        of_kind = [(row, key) for row, key in missing if key.kind == kind]
        return frozenset((pass_of(matched.reference, row), key.module, key.call) for row, key in of_kind)

    return CallsWithoutGradient(lacking("grad_output"), lacking("grad_input"))


def find_missing_gradients(
    matched: Matched, structure: Structure, affected: Collection[Spot], parameters: Parameters | None = None
) -> dict[int, Finding]:
    """Find where gradients end in two free runs. Keys are the reference's rows.

    A gradient counts as missing only if its module ran on both sides and others of its kind came in the same pass.
    In addition, parameters must lack their gradients, or a share of one, or get wrong ones (`affected` calls), or the
    gradient must be that of a term of the loss (`loss_terms.py`). Otherwise the runs may only have been captured or
    called differently.
    `parameters` is None if the candidate's are not known.
    """
    if not len(matched.alignment.only_reference):
        return {}
    expected = Counterparts(matched, parameters).expected
    missing = of_certain_modules(matched, missing_rows(matched, structure, parameters, expected=expected))
    needed = "param_grad" if "param_grad" in structure.kind else "grad_output"
    certain = missing
    if not any(key.kind == needed for _, key in missing):
        side, is_term = matched.reference, lost_terms(matched)
        certain = [
            (row, key)
            for row, key in missing
            if (pass_of(side, row), key.module, key.call) in affected
            or is_term(row, key)
            or _is_share_of_parameter(key, pass_of(side, row), structure)
        ]
        places = {key[:6] for _, key in certain}
        certain = [(row, key) for row, key in missing if not places.isdisjoint(_same_around(key))]
    if not certain:
        return {}
    callers = CallersInStructure(structure)
    row, key = certain[0]
    isolation = Isolation(callers=callers)
    if knows_detached(matched):
        cut_off = DetachedKeys(matched, {"input": "inputs", "output": "outputs"})
        outside = DetachedKeys(matched, {"output": "outputs_of_detached"})
        isolation = Isolation(callers=callers, cut_off=cut_off, outside=outside)
    by_names = matched.plan is None and not knows_detached(matched)
    ends = find_cuts(matched, structure, isolation, missing)
    for rows in (certain, missing):
        ends = ends or find_ends(matched, structure, isolation, rows, by_names)
    return ends or {row: missing_finding(matched, row, key, None)}


def _is_share_of_parameter(key: Key, scope: Pass, structure: Structure) -> bool:
    """Whether a call that gets no gradient at its output uses a parameter that gets one all the same, by another use
    of it, as a tied one does."""
    if key.kind != "grad_output":
        return False
    calls = [call for call in structure.calls_of_module.get((scope, key.module), ()) if call.number == key.call]
    if not calls or any(call.children or call.of("grad_output") for call in calls):
        return False
    return bool(structure.own_gradients.get((scope, key.module), ()))


def _same_around(key: Key) -> Iterator[tuple[object, ...]]:
    """Yield the place of a gradient, without its path, and for one at an input those of the modules around: what these
    do not send back may end inside."""
    yield key[:6]
    if key.kind == "grad_input":
        yield from (key._replace(module=name)[:6] for name in names_around(key.module))


def find_uncalled_modules(matched: Matched, structure: Structure, born: Sequence[Finding]) -> dict[int, Finding]:
    """Find modules that the candidate never calls, among those whose parameters an optimizer moves otherwise: these get
    no gradient. What the module would have added may be too little to show. Keys are the reference's rows."""
    left, right, alone = matched.reference, matched.candidate, matched.alignment.only_reference
    moved = {(each.rank, each.key.module) for each in born if each.cause == Cause.OPTIMIZER}
    uncalled = {name for _, name in moved if name in left.called and name not in right.called}
    found: dict[int, Finding] = {}
    named: set[tuple[int, str]] = set()
    for row in alone[left.kind.among(("param_grad",))[alone]].tolist() if uncalled else ():
        key, rank = left.key(row), int(left.rank[row])
        if key.module not in uncalled or (rank, key.module) not in moved - named:
            continue
        scope = pass_of(left, row)
        around = (name for name in names_around(key.module) if structure.calls_of_module.get((scope, name)))
        if (caller := next(around, None)) is not None:
            named.add((rank, key.module))
            found[row] = missing_finding(matched, row, key, caller, UNCALLED)
    return found


def find_uncertain_modules(matched: Matched, structure: Structure) -> list[str]:
    """Find modules whose parameters get a gradient on one side alone, and whose counterpart is a guess."""
    if matched.plan is None:
        return []
    rows = missing_rows(matched, structure, None, ("param_grad",), Counterparts(matched).expected)
    names = [key.module for _, key in rows] + [key.module for _, _, key in extra_rows(matched, structure)]
    return [name for name in dict.fromkeys(names) if not matched.is_certain(name)]
