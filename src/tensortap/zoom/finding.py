"""Finds the first operator of the candidate that the reference does not compute, and classifies it."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Literal

from tensortap.core.operators import Operator, OperatorTrace, SourceLine, TracedValue
from tensortap.zoom.matching import Values, epsilon_of
from tensortap.zoom.tracing import TracedCall

__all__ = ["Expand", "OperatorFinding", "Side", "find_cut", "find_difference", "find_rounding", "find_uncut"]

Kind = Literal[
    "arguments",
    "operands",
    "missing",
    "extra",
    "other",
    "overwritten",
    "returned",
    "source",
    "detached",
    "attached",
    "rounding",
    "failed",
]


@dataclass(frozen=True)
class OperatorFinding:
    """The first place in the code of two modules where they compute something else."""

    kind: Kind
    """arguments | operands | missing | extra | other | overwritten | returned | source | detached | attached | rounding
    | failed

    arguments, operands: the same operator with other plain arguments, or with other tensors. missing, extra: an
    operator that only the reference has, or only the candidate. other: another operator in its place. overwritten: an
    operator writes in place what a later one still reads. returned: a value is returned that the reference still
    changes. source: a parameter, buffer or constant differs. detached, attached: only the candidate cuts the gradient
    off, or only the reference. rounding: a coarser dtype. failed: its backward raises.
    """
    phase: str
    operator: Operator | None
    """The candidate's operator; None where it has none."""
    counterpart: Operator | None
    """The reference's operator; None where it has none."""
    line: SourceLine | None
    """The candidate's line to inspect."""
    reference_line: SourceLine | None
    name: str = ""
    """Name of the parameter, buffer, input or output, if the finding is about one."""
    dtypes: tuple[str, str] | None = None
    """The candidate's and the reference's dtype, where they are the difference."""
    reader: Operator | None = None
    """The candidate's operator that reads what was overwritten, or takes the value that an operator is missing from."""


class Side:
    """One trace, and its values that the other side has."""

    def __init__(self, call: TracedCall, values: Values, matched: Mapping[int, set[int]]) -> None:
        self.call, self.values, self.matched = call, values, matched

    @property
    def trace(self) -> OperatorTrace:
        return self.call.trace

    def region(self, start: Iterable[int]) -> tuple[list[Operator], list[int]]:
        """Return the operators between values that both sides have and these values, and sources that differ."""
        found: dict[int, Operator] = {}
        sources: list[int] = []
        waiting = list(start)
        seen = set(waiting)
        while waiting:
            number = waiting.pop()
            operator = self.trace.producer(number)
            if operator is None:
                sources.append(number)
                continue
            if operator.number in found:
                continue
            found[operator.number] = operator
            for each in (*operator.inputs, *self._before(number)):
                if each not in seen and not self.matched.get(each) and not self.trace.values[each].uninitialised:
                    seen.add(each)
                    waiting.append(each)
        return [found[number] for number in sorted(found)], sources

    def _before(self, number: int) -> tuple[int, ...]:
        replaced = self.trace.values[number].replaced
        return () if replaced is None else (replaced,)

    def line_of(self, value: int) -> SourceLine | None:
        operator = self.trace.producer(value)
        return None if operator is None else operator.line

    def lines_to(self, value: int) -> list[SourceLine]:
        """Return the line that computed a value, and those that moved its elements since."""
        lines = []
        operator = self.trace.producer(value)
        while operator is not None:
            if operator.line is not None:
                lines.append(operator.line)
            operator = self.trace.producer(operator.inputs[0]) if operator.moves and operator.inputs else None
        return lines[::-1]

    def upcast_of(self, value: int) -> Operator | None:
        """Return the operator that cast a value, or the value that it was moved from, to another dtype; None if there
        is none.
        """
        operator = self.trace.producer(value)
        while operator is not None and operator.moves and operator.name != "_to_copy":
            operator = self.trace.producer(operator.inputs[0]) if operator.inputs else None
        return operator if operator is not None and operator.name == "_to_copy" else None

    @cached_property
    def lines(self) -> set[SourceLine]:
        """Every line that ran, and called a line that ran."""
        return {line for each in self.trace.operators for line in (each.line, *each.callers) if line is not None}

    def new_lines(self, lines: Iterable[SourceLine], reference: Side) -> list[SourceLine]:
        """Return the lines among these that the reference's code does not have.

        Code that the reference has, but did not run, is not new; the code that led to it is. If both sides are in one
        file, only the lines that ran identify the code of a side.
        """
        known = {part.text for line in reference.lines for part in line.parts}
        files = {line.file for line in reference.lines} - {line.file for line in self.lines}
        for file in files:
            known |= {text.strip() for text in linecache.getlines(file)}
        return [part for line in lines for part in line.parts if part.text not in known]


class Expand:
    """Adds the parts of the reference's fused operators to its trace, and the candidate's values that match them."""

    def __init__(self, run: Callable[[Operator], Sequence[Sequence[Operator]]]) -> None:
        self._run = run

    def best(self, side: Side, operators: list[Operator], known: set[str]) -> list[Operator]:
        """Return the operators, with each fused one replaced by its parts.

        Of several ways to split it, take the one with the most parts that the other side has.

        known: names of operators that the other side has as they are.
        """
        expanded: list[Operator] = []
        for operator in operators:
            ways = () if operator.name in known else self._run(operator)
            if not ways:
                expanded.append(operator)
                continue
            best = max(ways, key=lambda parts: sum(bool(side.matched.get(v)) for each in parts for v in each.outputs))
            expanded += [each for each in best if not any(side.matched.get(v) for v in each.outputs)]
        return expanded


def find_difference(
    candidate: Side, reference: Side, wrong: list[tuple[str, int, int]], expand: Expand, phase: str
) -> OperatorFinding:
    """Return the first difference on the way to the wrong values.

    wrong: name, candidate's and reference's number of each output, or gradient, that differs.
    """
    theirs, their_sources = reference.region([number for _, _, number in wrong])
    ours, sources = candidate.region([number for _, number, _ in wrong])
    theirs = expand.best(reference, theirs, {each.name for each in ours})
    ours, sources = candidate.region([number for _, number, _ in wrong])  # parts of the reference's may have matched
    unknown = [candidate.trace.values[each].name for each in sources if candidate.trace.values[each].name]
    named = {reference.trace.values[each].name for each in their_sources}
    differing = [name for name in unknown if name in named]
    if differing and not _before_all(ours, candidate, sources):
        return _of_source(differing[0], candidate, reference, sources, phase)
    counterpart = theirs[0] if theirs else None
    # A matched value may have been put to another use: the first operator is then one that both sides have.
    first = ours[0] if ours else None
    if first is None or all(candidate.matched.get(number) for _, number, _ in wrong):
        name, number, _ = wrong[0]
        made = candidate.trace.producer(number)
        line = candidate.line_of(number)
        return OperatorFinding(
            "returned", phase, made, counterpart, line, counterpart.line if counterpart else None, name
        )
    return _classify(candidate, reference, ours, theirs, phase)


def _before_all(ours: list[Operator], candidate: Side, sources: list[int]) -> bool:
    """Whether the first operator reads none of the sources that differ."""
    return bool(ours) and not any(each in sources for each in ours[0].inputs)


def _of_source(name: str, candidate: Side, reference: Side, sources: list[int], phase: str) -> OperatorFinding:
    number = next(each for each in sources if candidate.trace.values[each].name == name)
    reader = next((each for each in candidate.trace.operators if number in each.inputs), None)
    return OperatorFinding("source", phase, reader, None, reader.line if reader else None, None, name)


def _classify(
    candidate: Side, reference: Side, ours: list[Operator], theirs: list[Operator], phase: str
) -> OperatorFinding:
    first = ours[0]
    twin = _twin(first, theirs, candidate)
    if twin is not None:
        pairs = list(zip(first.inputs, twin.inputs, strict=False))
        wrong = [(mine, their) for mine, their in pairs if their not in candidate.matched.get(mine, ())]
        if not wrong and len(first.inputs) == len(twin.inputs):
            return OperatorFinding("arguments", phase, first, twin, _own_line(first, candidate, reference), twin.line)
        for mine, their in wrong:
            writer = _overwriting(candidate, mine, their)
            if writer is not None:
                return OperatorFinding("overwritten", phase, writer, twin, writer.line, twin.line, reader=first)
    line = _own_line(first, candidate, reference)
    counterpart = theirs[0] if theirs else None
    their_line = counterpart.line if counterpart is not None else None
    change = _first_change([each.name for each in theirs], [each.name for each in ours])
    if change == "delete" and counterpart is not None:
        line = _line_of_missing(candidate, reference, first, counterpart)
        their_line = _own_line(counterpart, reference, candidate)  # a call that the candidate lacks, not what it runs
        return OperatorFinding("missing", phase, None, counterpart, line, their_line, reader=first)
    if change == "insert":
        return OperatorFinding("extra", phase, first, counterpart, line, their_line)
    if twin is not None:
        return OperatorFinding("operands", phase, first, twin, line, twin.line)
    return OperatorFinding("other", phase, first, counterpart, line, their_line)


def _first_change(theirs: Sequence[str], ours: Sequence[str]) -> str:
    """Return the first difference in the names of the operators: "delete", "insert", "replace" or "equal"."""
    changes = SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes()
    return changes[0][0] if changes else "equal"


def _own_line(operator: Operator, candidate: Side, reference: Side) -> SourceLine | None:
    """Return the nearest line of an operator that the reference's code does not have; its own line if it has all.

    A mistake in the call of a function that both sides use is on the line of the call. One that moves elements wrongly
    may first show where they are read.
    """
    lines = [line for line in (operator.line, *operator.callers) if line is not None]
    lines += [line for number in operator.inputs for line in candidate.lines_to(number)]
    return next(iter(candidate.new_lines(lines, reference)), operator.line)


def _twin(operator: Operator, others: list[Operator], candidate: Side) -> Operator | None:
    """Return the reference's operator of the same name that shares most operands."""

    def shared(other: Operator) -> int:
        return sum(any(their in candidate.matched.get(mine, ()) for their in other.inputs) for mine in operator.inputs)

    same = [each for each in others if each.name == operator.name]
    best = max(same, key=shared, default=None)
    return best if best is not None and (shared(best) or not operator.inputs) else None


def _overwriting(candidate: Side, mine: int, their: int) -> Operator | None:
    """Return the operator that wrote the operand over the value that the reference reads in its place."""
    value = candidate.trace.values[mine]
    while value.replaced is not None:
        earlier = candidate.trace.values[value.replaced]
        if their in candidate.matched.get(earlier.number, ()):
            return candidate.trace.producer(value.number)
        value = earlier
    return None


def _line_of_missing(candidate: Side, reference: Side, first: Operator, missing: Operator) -> SourceLine | None:
    """Return the candidate's line that lacks an operator: where its operand is made or moved, or where it is read.

    A line that does not occur in the reference's code is preferred. Else it is the line of the operand if the reference
    computes both on one line.
    """
    operand = next(
        (mine for mine in first.inputs if candidate.matched.get(mine, set()) & set(missing.inputs)),
        next(iter(first.inputs), None),
    )
    lines = [] if operand is None else candidate.lines_to(operand)
    if not lines:
        return first.line
    new = candidate.new_lines([line for line in (*lines, first.line) if line is not None], reference)
    if new:
        return new[0]
    their = [reference.line_of(each) for each in missing.inputs]
    together = any(line is not None and missing.line is not None and line.line == missing.line.line for line in their)
    return lines[0] if together else first.line


def find_cut(candidate: Side, reference: Side, names: Iterable[str]) -> OperatorFinding | None:
    """Return the first operator of the forward whose result takes no part in autograd, as the reference's does."""
    needed = _ancestors(candidate.trace, candidate.call.outputs.values())
    needed_there = _ancestors(reference.trace, reference.call.outputs.values())

    def made_by(value: TracedValue) -> str:
        """Return the name of the operator; empty if nothing reads its result, such as values that autograd saves."""
        return reference.trace.operators[value.producer].name if value.producer in needed_there else ""

    for operator in candidate.trace.operators:
        if operator.phase != "forward" or operator.part_of is not None or operator.number not in needed:
            continue
        for number in operator.outputs:
            value = candidate.trace.values[number]
            theirs = [reference.trace.values[each] for each in candidate.matched.get(number, ())]
            if value.differentiable or not theirs or epsilon_of(value.dtype) == 0:
                continue
            if any(not each.differentiable and made_by(each) == operator.name for each in theirs):
                continue  # the reference leaves autograd in the same way
            if any(each.differentiable for each in theirs):
                twin = next((reference.trace.producer(each.number) for each in theirs if each.differentiable), None)
                return OperatorFinding(
                    "detached",
                    "backward",
                    operator,
                    twin,
                    operator.line,
                    twin.line if twin else None,
                    ", ".join(names),
                )
    return None


def find_uncut(candidate: Side, reference: Side, names: Iterable[str]) -> OperatorFinding | None:
    """Return the first operator of the forward that passes a gradient to a value that the reference has detached."""
    needed = _ancestors(reference.trace, reference.call.outputs.values())
    for cut in reference.trace.operators:
        if cut.phase != "forward" or cut.number not in needed or not _cuts(cut, reference.trace):
            continue
        for reader in reference.trace.operators:
            if reader.phase != "forward" or not set(cut.outputs) & set(reader.inputs):
                continue
            twins = {number for each in reader.outputs for number in reference.matched.get(each, ())}
            made = [candidate.trace.producer(number) for number in sorted(twins)]
            ours = [each for each in made if each is not None and each.phase == "forward"]
            ours.sort(key=lambda each, name=reader.name: each.name != name)  # type: ignore[misc]  # views share values
            if any(_reads_cut(each, candidate.trace) for each in ours) or not ours:
                continue
            if all(candidate.trace.values[number].differentiable for number in ours[0].outputs):
                line = _own_line(ours[0], candidate, reference)
                return OperatorFinding("attached", "backward", ours[0], cut, line, cut.line, ", ".join(names))
    return None


def _cuts(operator: Operator, trace: OperatorTrace) -> bool:
    """Whether an operator of the forward takes a value out of autograd, without any other effect."""
    return operator.moves and any(
        not trace.values[made].differentiable and trace.values[read].differentiable
        for made in operator.outputs
        for read in operator.inputs[:1]
        if epsilon_of(trace.values[made].dtype)
    )


def _reads_cut(operator: Operator, trace: OperatorTrace) -> bool:
    """Whether an operator reads a value that was taken out of autograd."""
    makers = [trace.producer(number) for number in operator.inputs]
    return any(maker is not None and _cuts(maker, trace) for maker in makers)


def _ancestors(trace: OperatorTrace, values: Iterable[int]) -> set[int]:
    found: set[int] = set()
    waiting = list(values)
    while waiting:
        operator = trace.producer(waiting.pop())
        if operator is not None and operator.number not in found:
            found.add(operator.number)
            waiting += operator.inputs
    return found


def find_rounding(
    candidate: Side, reference: Side, rows: Iterable[tuple[Operator | None, Operator | None]]
) -> OperatorFinding | None:
    """Return the first operator that computes in a coarser dtype than its counterpart."""
    for theirs, ours in rows:
        if ours is None or theirs is None or ours.name != theirs.name or ours.moves:
            continue
        mine, their = _coarsest(candidate.trace, ours), _coarsest(reference.trace, theirs)
        if mine > their > 0:
            upcasts = (reference.upcast_of(each) for each in theirs.inputs)
            upcast = next((each.line for each in upcasts if each is not None), theirs.line)
            dtypes = _coarsest_dtype(candidate.trace, ours), _coarsest_dtype(reference.trace, theirs)
            line = _own_line(ours, candidate, reference)
            return OperatorFinding("rounding", ours.phase, ours, theirs, line, upcast, dtypes=dtypes)
    return None


def _coarsest(trace: OperatorTrace, operator: Operator) -> float:
    return max((epsilon_of(trace.values[each].dtype) for each in (*operator.inputs, *operator.outputs)), default=0.0)


def _coarsest_dtype(trace: OperatorTrace, operator: Operator) -> str:
    dtypes = [trace.values[each].dtype for each in (*operator.inputs, *operator.outputs)]
    return max(dtypes, key=epsilon_of)
