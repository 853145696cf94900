"""Gradients that the candidate should have and lacks: their modules ran, and others came in the same pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from tensortap.compare.align.distinct import are_among
from tensortap.compare.align.side import Ints
from tensortap.compare.judge.counterparts import Pass, pass_of
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.structure import Structure
from tensortap.compare.matched import Matched
from tensortap.core.records import GRADIENT_KINDS, Key

__all__ = [
    "Parameters",
    "calls_reading",
    "have_calls_with",
    "is_expected",
    "lacks_its_value",
    "missing_rows",
    "of_certain_modules",
    "ran_on_both",
    "unfinished_step",
]

Parameters = Collection[tuple[str, str]]
"""The candidate's own parameters, by the module in the reference's names and the name there."""


def missing_rows(
    matched: Matched,
    structure: Structure,
    parameters: Parameters | None,
    kinds: Collection[str] = GRADIENT_KINDS,
    expected: Callable[[Key], bool] | None = None,
) -> list[tuple[int, Key]]:
    """Return the reference's gradients that the candidate should have and lacks."""
    left, unfinished = matched.reference, unfinished_step(matched)
    alone = matched.alignment.only_reference
    rows = alone[left.kind.among(kinds)[alone]]
    came = structure.kinds_in_pass if len(rows) else set()
    ran = _ran(matched, rows)
    values = alone[left.kind.among(("input", "output"))[alone]] if len(rows) else alone[:0]
    lost = {left.key(row) for row in values.tolist()}
    missing = []
    for row, has_run in zip(rows.tolist(), ran, strict=True):
        if has_run is False:
            continue
        key, scope = left.key(row), pass_of(left, row)
        if (scope, key.kind) not in came or key.step == unfinished or not is_expected(key, parameters):
            continue
        if lacks_its_value(key, lost):
            continue
        if has_run is None and not ran_on_both(matched, structure, scope, key):
            continue
        if expected is None or expected(key):
            missing.append((row, key))
    return missing


def of_certain_modules(matched: Matched, rows: Sequence[tuple[int, Key]]) -> list[tuple[int, Key]]:
    """Return the rows of modules whose counterpart is not a guess."""
    return [(row, key) for row, key in rows if matched.is_certain(key.module)]


def unfinished_step(matched: Matched) -> int | None:
    """Return the step, in the reference's numbers, in which the candidate stopped; None if it finished."""
    if matched.candidate.run.finished:
        return None
    return int(matched.reference.step[matched.alignment.reference].max(initial=-1))


def is_expected(key: Key, parameters: Parameters | None) -> bool:
    """Whether the candidate should have a record: it is a gradient, and not of a parameter that is kept elsewhere."""
    if key.phase != "backward" or "~" in key.path:
        return False
    return key.kind != "param_grad" or parameters is None or (key.module, key.path) in parameters


def lacks_its_value(key: Key, lost: Collection[Key]) -> bool:
    """Whether a gradient is that of a value which the candidate does not return or take, such as attention weights: it
    has no place there. If something reads the value, that shows elsewhere."""
    if key.kind == "param_grad":
        return False
    value = key._replace(phase="forward", kind=key.kind.removeprefix("grad_"), path=key.path.partition("~")[0])
    return value in lost


def _ran(matched: Matched, rows: Ints) -> Sequence[bool | None]:
    """Return of gradients whether their calls ran on both sides, in columns; None where names do not show it."""
    return [None] * len(rows) if matched.plan is not None else have_calls_with(matched, rows, "output")


def have_calls_with(matched: Matched, rows: Ints, kind: str) -> Sequence[bool | None]:
    """Return of the reference's gradients whether a record of a kind is paired that is of their calls; for a
    parameter's, of any call of its module in that pass. None if that module is never called: the calls of the module
    around it tell."""
    if not len(rows):
        return []
    side, paired = matched.reference, matched.alignment.reference
    wanted = paired[side.kind.among((kind,))[paired]]
    names = ("rank", "step", "pass_number")
    places = [[*(getattr(side, name)[at] for name in names), side.module.codes[at]] for at in (rows, wanted)]
    called = [[*columns, side.call[at]] for columns, at in zip(places, (rows, wanted), strict=True)]
    of_parameters = side.kind.among(("param_grad",))[rows]
    found: list[bool | None] = np.where(of_parameters, are_among(*places), are_among(*called)).tolist()
    # Where the candidate lacks the module, its parameter may have another name.
    uncalled = [module not in side.called and matched.candidate.may_have(module) for module in side.module.at(rows)]
    unknown = of_parameters & np.array(uncalled, bool)
    return [None if is_unknown else has for has, is_unknown in zip(found, unknown.tolist(), strict=True)]


def ran_on_both(matched: Matched, structure: Structure, scope: Pass, key: Key) -> bool:
    """Return whether the call of a gradient ran on both sides.

    A mapping may place a parameter in a module that packs it differently; then the module around it suffices.
    """
    calls = structure.calls_of_module.get((scope, key.module), ())
    if key.kind == "param_grad":
        if matched.plan is None:
            calls = calls_reading(matched, structure, scope, key.module)
        if any(call.of("output") for call in calls) or matched.plan is None:
            return any(call.of("output") for call in calls)
        return bool(key.module) and ran_on_both(
            matched, structure, scope, key._replace(module=key.module.rpartition(".")[0])
        )
    outputs = [call for call in calls if call.number == key.call and call.of("output")]
    if matched.plan is None:
        return bool(outputs)
    value = key.kind.removeprefix("grad_")  # may lack a counterpart, as an additional argument does
    return any(structure.path[row] == key.path for call in outputs for row in call.of(value))


def calls_reading(matched: Matched, structure: Structure, scope: Pass, module: str) -> list[CallRows]:
    """Return the calls that read a module's parameters: its own, or, of a module that neither side calls, those of the
    module around it."""
    if matched.candidate.may_have(module):
        while module and module not in matched.reference.called and module not in matched.candidate.called:
            module = module.rpartition(".")[0]
    return structure.calls_of_module.get((scope, module), [])
