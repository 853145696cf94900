"""Sources of all records of a step as columns, and what rules ask about their modules.

Rows are counted from the first one of the step, so that steps which repeat it share its facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.record_columns import RecordColumns
from tensortap.compare.judge.row_lists import Ints, RowLists, RowListsBuilder
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.steps.structure import StepStructure

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


_OF_LEAVES = {"output": ("input",), "grad_input": ("grad_output", "input", "output")}
"""Kinds of the sources of a record, all of its own call, if that calls no others and no state is recorded."""


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
    """The outputs of these calls."""


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
    flags = bytearray(end - begin)
    rows = slice(begin, end)
    kinds, first_seen = columns.kind, columns.first_seen
    modules: dict[tuple[int, int, int], dict[str, _ModuleFacts]] = {}
    in_scope: dict[str, _ModuleFacts] = {}
    last, has_state = None, bool(step.parameters.of_module)
    summed: list[int] = []
    for place, (kind, scope, module, first) in enumerate(
        zip(kinds[rows], columns.scope[rows], columns.module[rows], first_seen[rows], strict=True)
    ):
        row = begin + place
        if kind not in KINDS_WITH_FACTS:
            sources.add()
            continue
        if first < row:
            sources.add((first,))
            flags[place] = SEEN
            continue
        if scope is not last:  # hardly ever: hashing it for each row takes long
            in_scope, last = modules.setdefault(scope, {}), scope
        own = in_scope.get(module)
        if own is None:
            own = in_scope[module] = _ModuleFacts(step, columns, scope, module)
        if kind == "param_grad":
            before = own.before(row)
            flags[place] = own.flags_of_gradients | FOLLOWED * (len(before) < len(own.sources_of_gradients))
            if not own.has_gradients_at_outputs or (
                before is not own.sources_of_gradients and not any(kinds[source] == "grad_output" for source in before)
            ):
                summed.append(row)
            sources.add(before)
            continue
        call = step.calls.of_row(row)
        if call is not None and not has_state and not call.children and kind in _OF_LEAVES:
            before = call.of(*_OF_LEAVES[kind])  # as `sources` has them, for most records
            if before and max(before) >= row:
                flags[place] = FOLLOWED
                before = [source for source in before if source < row]
            sources.add(before)
            flags[place] |= own.flags
            continue
        found = step.sources(row)
        before = found.rows
        if before and max(before) >= row:
            before = [source for source in before if source < row]
        sources.add(before)
        if found.sent:
            sent[place] = tuple(source - begin for source in found.sent)
        flag = own.flags | FOLLOWED * (len(before) < len(found.rows))
        if call is not None:
            flag |= BY_CONTAINER * _is_made_by_container(call, kind)
            if kind == "grad_output" and call.parent is None and not call.children:
                flag |= UNSEEN * step.parameters.has_gradients_beside(scope, module)
            elif kind == "grad_output" and step.has_uncalled and call.parent is not None:
                flag |= UNSEEN * bool(step.held_inside(step.calls.innermost(row, call)))
        flags[place] = flag
    return StepFacts(sources.build(), np.frombuffer(flags, np.uint8), sent, _summed_facts(step, columns, begin, summed))


class _ModuleFacts:
    """Facts that all records of one module in one scope share."""

    def __init__(self, step: StepStructure, columns: RecordColumns, scope: tuple[int, int, int], module: str) -> None:
        has_state = bool(step.parameters.of_module) and (*scope[:2], module) in step.parameters.of_module
        place = scope, module
        gradients = step.parameters.own_gradients.get(place, ())
        self.flags = HAS_STATE * has_state | HAS_PARAMETERS * (has_state or bool(gradients))
        self.sources_of_gradients: Sequence[int] = ()
        if gradients:
            self.sources_of_gradients = step.sources(gradients[0]).rows
            own = step.calls.of_module.get(place, ())
            self.flags_of_gradients = self.flags | BY_CONTAINER * any(call.children for call in own)
        self.has_gradients_at_outputs = any(columns.kind[row] == "grad_output" for row in self.sources_of_gradients)
        self._last_source = max(self.sources_of_gradients, default=-1)

    def before(self, row: int) -> Sequence[int]:
        """Return the sources of a parameter's gradient that were recorded before it."""
        if self._last_source < row:
            return self.sources_of_gradients
        return [source for source in self.sources_of_gradients if source < row]


def _summed_facts(step: StepStructure, columns: RecordColumns, begin: int, rows: list[int]) -> SummedFacts:
    own, inputs, outputs = (RowListsBuilder(begin) for _ in range(3))
    for row in rows:
        calls = step.users_of_own(row)
        own.add(step.parameters.own_gradients.get((columns.scope[row], columns.module[row]), ()))
        inputs.add(each for call in calls for each in call.of("input"))
        outputs.add(each for call in calls for each in call.of("output"))
    return SummedFacts(np.array(rows, np.int64) - begin, own.build(), inputs.build(), outputs.build())


def _is_made_by_container(call: CallRows, kind: str) -> bool:
    return call.parent is not None if kind in ("input", "grad_output") else bool(call.children)
