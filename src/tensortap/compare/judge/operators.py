"""Judge the operators below the modules: they show where in a module a wrong value was born, not whether it is wrong.

Code may arrive at the same outputs by other operators. So an operator that differs is wrong only if something that its
module made is wrong; otherwise it is left unjudged. It is never a birth of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensortap.compare.judge.rules.evidence import Evidence, JudgedPair
from tensortap.compare.judge.rules.names import ROUNDING
from tensortap.compare.judge.rules.tolerance import find_tolerance
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.structure import Structure
from tensortap.core.records import RIGHT_STATUSES

__all__ = ["OTHER_WAY", "judge_operators"]

OTHER_WAY = "an operator on another way to values that agree"


def judge_operators(evidence: Evidence, status: list[str], rule: list[str], tolerance: Any) -> None:
    """Set status, rule and tolerance of the rows of operators, after all others were judged."""
    structure, pairs = evidence.structure, evidence.pairs
    for row in structure.operators:
        if status[row] in RIGHT_STATUSES or not (evidence.is_known(row) or pairs.reshaped[row]):
            continue
        call = structure.call_of(row)
        sources = [] if call is None else _sources(structure, call, row)
        known = [evidence.propagated[each] for each in sources if evidence.is_known(each) and not evidence.wrong[each]]
        allowed, name, _ = find_tolerance(JudgedPair(evidence, row, sources, max(known, default=0.0)))
        tolerance[row] = allowed
        if not pairs.reshaped[row] and not pairs.nonfinite[row] and evidence.error[row] <= allowed:
            status[row], rule[row] = "close", name
        elif call is not None and any(evidence.wrong[each] for each in _made(structure, call, row)):
            status[row] = "shape" if pairs.reshaped[row] else "nonfinite" if pairs.nonfinite[row] else "diverged"
            rule[row] = ROUNDING
        else:
            status[row], rule[row] = "unjudged", OTHER_WAY


def _is_backward(structure: Structure, row: int) -> bool:
    return structure.phase_of(row) == "backward"


def _sources(structure: Structure, call: CallRows, row: int) -> list[int]:
    """Return what an operator may have read: what came into its call, and what came back from modules inside."""
    inside = [each for child in call.children for each in child.of("output", "grad_output", "grad_input")]
    own = call.of("input", "grad_output") + structure.parameters_of.get((*call.scope[:2], call.module), [])
    return [each for each in own + inside if structure.seq[each] < structure.seq[row]]


def _made(structure: Structure, call: CallRows, row: int) -> Iterable[int]:
    """Yield the records that the code of an operator's call made, and those that came into it."""
    if not _is_backward(structure, row):
        yield from call.of("input", "output")
        for child in call.children:
            yield from child.of("input", "output")
        return
    yield from call.of("grad_output", "grad_input")
    yield from structure.own_gradients.get((call.scope, call.module), ())
    for child in call.children:
        yield from child.of("grad_output", "grad_input")
    for given in call.of("input"):  # the gradient of an input is recorded where the input was made
        for maker, made in structure.makers.get(structure.tensor[given], ()):
            path = structure.path[made]
            yield from (each for each in maker.of("grad_output") if structure.path[each].partition("~")[0] == path)
