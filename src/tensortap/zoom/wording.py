"""The sentence of a zoom: the place where the candidate's code computes something else, and the difference."""

from __future__ import annotations

from collections.abc import Sequence

from tensortap.core.operators import Operator, SourceLine
from tensortap.zoom.finding import OperatorFinding

__all__ = ["describe", "describe_match"]

_LONGEST = 90


def describe(finding: OperatorFinding) -> str:
    """Return one sentence about the first difference."""
    return f"{_place(finding.line)}{_what(finding)}{_reference(finding)}."


def describe_match(equal: bool, worst: float, count: int) -> str:
    """Return the sentence for two modules that compute the same."""
    if equal:
        return f"Both modules compute the same: all outputs and gradients are equal, over {count} operators."
    return f"Both modules compute the same: outputs and gradients agree to {worst:.1e}, over {count} operators."


def _what(finding: OperatorFinding) -> str:
    ours, theirs = finding.operator, finding.counterpart
    match finding.kind:
        case "arguments":
            return f"the candidate computes {_code(ours)} with {_arguments(ours, theirs)}"
        case "operands":
            return f"the candidate computes {_code(ours)} from other tensors"
        case "missing":
            return f"the candidate computes {_expression(finding.line)} without {_name(theirs)}"
        case "extra":
            return f"the candidate computes {_code(ours)} ({_name(ours)}), which the reference does not"
        case "overwritten":
            reader = "" if finding.reader is None else f", which {_at(finding.reader.line)} still reads"
            return f"the candidate overwrites a tensor in place by {_code(ours)}{reader}"
        case "returned":
            what = "as it is" if theirs is None else f"without {_name(theirs)}"
            return f"the candidate returns {_expression(finding.line)} {what} as {finding.name}"
        case "source":
            return f"the candidate reads {finding.name}, which has other values than in the reference"
        case "detached":
            of = f"; {finding.name} gets a wrong gradient or none" if finding.name else ""
            return f"the candidate cuts the gradient off at {_code(ours)}{of}"
        case "attached":
            return f"the candidate passes a gradient back through {_code(ours)}, which the reference has detached"
        case "failed":
            return f"The outputs agree, but the backward of the candidate fails: {finding.name}"
        case "rounding":
            mine, their = finding.dtypes or ("a coarser dtype", "a finer one")
            return f"the candidate computes {_code(ours)} in {mine} instead of {their}"
    return f"the candidate computes {_code(ours)} ({_name(ours)}) where the reference has {_name(theirs)}"


def _reference(finding: OperatorFinding) -> str:
    line = finding.reference_line
    if line is None:
        return ""
    return f" (the reference: {_expression(line)} in {line})"


def _place(line: SourceLine | None) -> str:
    return "" if line is None else f"In {line}, "


def _at(line: SourceLine | None) -> str:
    return "a later operator" if line is None else f"{line}"


def _name(operator: Operator | None) -> str:
    return "an operator" if operator is None else operator.name.strip("_")


def _code(operator: Operator | None) -> str:
    if operator is None:
        return "an operator"
    return _expression(operator.line) if operator.line is not None else operator.name


def _expression(line: SourceLine | None) -> str:
    text = "" if line is None else line.expression
    if not text:
        return "an expression"
    return f"`{text if len(text) <= _LONGEST else text[: _LONGEST - 1] + '…'}`"


def _arguments(ours: Operator | None, theirs: Operator | None) -> str:
    mine: Sequence[str] = () if ours is None else ours.arguments
    their: Sequence[str] = () if theirs is None else theirs.arguments
    only = [each for each in mine if each not in their], [each for each in their if each not in mine]
    if not any(only):
        return "other results"
    return f"{', '.join(only[0]) or 'defaults'} instead of {', '.join(only[1]) or 'defaults'}"
