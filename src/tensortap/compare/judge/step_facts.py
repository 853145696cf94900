"""Sources of all records of a step as columns, and what rules ask about their modules.

Rows are counted from the first one of the step, so that steps which repeat it share its facts.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.step_structure import CallRows, RecordColumns, StepStructure

__all__ = [
    "BY_CONTAINER",
    "HAS_PARAMETERS",
    "HAS_STATE",
    "KINDS_WITH_FACTS",
    "SEEN",
    "UNSEEN",
    "StepFacts",
    "facts_of_step",
]

BY_CONTAINER, HAS_PARAMETERS, HAS_STATE, UNSEEN, SEEN = 1, 2, 4, 8, 16
"""Flags of a record: the own code of a module that calls others made it; its module has parameters or gradients of
these; its parameters before the step are recorded; it may be the gradient of an output that a model reads unseen; the
same tensor was seen before, and then its first record is the only source here: both are usually judged alike."""

KINDS_WITH_FACTS = ("input", "output", "grad_output", "grad_input", "param_grad")


@dataclass(frozen=True)
class StepFacts:
    begins: npt.NDArray[np.int64]
    """For each row, and one more: where its sources begin in `sources`."""
    sources: npt.NDArray[np.int32]
    flags: npt.NDArray[np.uint8]
    sent: dict[int, tuple[int, ...]]
    """Rows with more sources if the gradients that were sent back, which are these rows, are small; see `Sources`."""


def facts_of_step(step: StepStructure, columns: RecordColumns, begin: int, end: int) -> StepFacts:
    """Work out the facts of the rows of a step. Records of other kinds than KINDS_WITH_FACTS have none."""
    sources: array[int] = array("i")
    sent: dict[int, tuple[int, ...]] = {}
    ends = np.zeros(end - begin + 1, np.int64)
    flags = np.zeros(end - begin, np.uint8)
    rows = slice(begin, end)
    first_seen = columns.first_seen
    of_module: dict[tuple[tuple[int, int, int], str], int] = {}
    with_gradients = _scopes_with_gradients(step)
    for row, (kind, scope, module) in enumerate(
        zip(columns.kind[rows], columns.scope[rows], columns.module[rows], strict=True), begin
    ):
        if kind in KINDS_WITH_FACTS:
            if first_seen[row] < row:
                sources.append(first_seen[row] - begin)
                flags[row - begin] = SEEN
                ends[row - begin + 1] = len(sources)
                continue
            found = step.sources(row)
            sources.extend([source - begin for source in found.rows if source < row])
            if found.sent:
                sent[row - begin] = tuple(source - begin for source in found.sent)
            place = scope, module
            if place not in of_module:
                of_module[place] = _flags_of_module(step, *place)
            call = step.call_of(row)
            flag = of_module[place]
            if kind == "param_grad":
                own = step.calls_of_module.get(place, ())
                flag |= BY_CONTAINER * any(each.children for each in own)
            elif call is not None:
                flag |= BY_CONTAINER * _is_made_by_container(call, kind)
                if kind == "grad_output" and call.parent is None and not call.children:
                    flag |= UNSEEN * bool(with_gradients.get(scope, set()) - {module})
            flags[row - begin] = flag
        ends[row - begin + 1] = len(sources)
    return StepFacts(ends, np.array(sources, np.int32), flags, sent)


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
