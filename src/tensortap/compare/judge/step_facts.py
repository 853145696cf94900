"""Sources of all records of a step as columns, and what rules ask about their modules.

Rows are counted from the first one of the step, so that steps which repeat it share its facts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.row_lists import Ints, RowLists, RowListsBuilder
from tensortap.compare.judge.step_structure import CallRows, RecordColumns, StepStructure

__all__ = [
    "BY_CONTAINER",
    "FOLLOWED",
    "HAS_PARAMETERS",
    "HAS_STATE",
    "KINDS_WITH_FACTS",
    "SEEN",
    "UNSEEN",
    "StepFacts",
    "SummedFacts",
    "facts_of_step",
]

BY_CONTAINER, HAS_PARAMETERS, HAS_STATE, UNSEEN, SEEN, FOLLOWED = 1, 2, 4, 8, 16, 32
"""Flags of a record: the own code of a module that calls others made it; its module has parameters or gradients of
these; its parameters before the step are recorded; it may be the gradient of an output that a model reads unseen; the
same tensor was seen before, and then its first record is the only source here: both are usually judged alike; some of
its sources are recorded after it, and are left out here."""

KINDS_WITH_FACTS = ("input", "output", "grad_output", "grad_input", "param_grad", "param", "step_grad")


@dataclass(frozen=True)
class SummedFacts:
    """Records of the modules whose parameters have a gradient, while none at their outputs is recorded."""

    rows: Ints
    """Gradients of parameters, in order."""
    own: RowLists
    """For each of these: all gradients of its module's parameters."""
    inputs: RowLists
    """The inputs of the calls that used the parameter."""
    outputs: RowLists
    """What these calls returned."""


@dataclass(frozen=True)
class StepFacts:
    sources: RowLists
    flags: npt.NDArray[np.uint8]
    sent: dict[int, tuple[int, ...]]
    """Rows with more sources if the gradients that were sent back, which are these rows, are small; see `Sources`."""
    summed: SummedFacts


def facts_of_step(step: StepStructure, columns: RecordColumns, begin: int, end: int) -> StepFacts:
    """Work out the facts of the rows of a step. Records of other kinds than KINDS_WITH_FACTS have none."""
    sources = RowListsBuilder(begin)
    sent: dict[int, tuple[int, ...]] = {}
    flags = np.zeros(end - begin, np.uint8)
    rows = slice(begin, end)
    first_seen = columns.first_seen
    of_module: dict[tuple[tuple[int, int, int], str], int] = {}
    of_parameters: dict[tuple[tuple[int, int, int], str], int] = {}
    with_gradients = _scopes_with_gradients(step)
    summed: list[int] = []
    for row, (kind, scope, module) in enumerate(
        zip(columns.kind[rows], columns.scope[rows], columns.module[rows], strict=True), begin
    ):
        if kind not in KINDS_WITH_FACTS:
            sources.add()
            continue
        if first_seen[row] < row:
            sources.add((first_seen[row],))
            flags[row - begin] = SEEN
            continue
        found = step.sources(row)
        before = found.rows
        if before and max(before) >= row:
            before = [source for source in found.rows if source < row]
        sources.add(before)
        if found.sent:
            sent[row - begin] = tuple(source - begin for source in found.sent)
        place = scope, module
        if place not in of_module:
            of_module[place] = _flags_of_module(step, *place)
            calls = step.calls_of_module.get(place, ())
            of_parameters[place] = BY_CONTAINER * any(call.children for call in calls)
        flag = of_module[place] | FOLLOWED * (len(before) < len(found.rows))
        if kind == "param_grad":
            flag |= of_parameters[place]
            if not any(columns.kind[source] == "grad_output" for source in before):
                summed.append(row)
        elif (call := step.call_of(row)) is not None:
            flag |= BY_CONTAINER * _is_made_by_container(call, kind)
            if kind == "grad_output" and call.parent is None and not call.children:
                flag |= UNSEEN * bool(with_gradients.get(scope, set()) - {module})
        flags[row - begin] = flag
    return StepFacts(sources.build(), flags, sent, _summed_facts(step, columns, begin, summed))


def _summed_facts(step: StepStructure, columns: RecordColumns, begin: int, rows: list[int]) -> SummedFacts:
    own, inputs, outputs = (RowListsBuilder(begin) for _ in range(3))
    for row in rows:
        calls = step.users_of_own(row)
        own.add(step.own_gradients.get((columns.scope[row], columns.module[row]), ()))
        inputs.add(each for call in calls for each in call.of("input"))
        outputs.add(each for call in calls for each in call.of("output"))
    return SummedFacts(np.array(rows, np.int64) - begin, own.build(), inputs.build(), outputs.build())


def _flags_of_module(step: StepStructure, scope: tuple[int, int, int], module: str) -> int:
    has_state = (*scope[:2], module) in step.parameters_of
    return HAS_STATE * has_state | HAS_PARAMETERS * (has_state or (scope, module) in step.own_gradients)


def _is_made_by_container(call: CallRows, kind: str) -> bool:
    return call.parent is not None if kind in ("input", "grad_output") else bool(call.children)


def _scopes_with_gradients(step: StepStructure) -> dict[tuple[int, int, int], set[str]]:
    """Return the modules that have gradients of own parameters, by scope."""
    found: dict[tuple[int, int, int], set[str]] = {}
    for scope, module in step.own_gradients:
        found.setdefault(scope, set()).add(module)
    return found
