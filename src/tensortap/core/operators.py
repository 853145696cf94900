"""The operators that a module ran, as plain data: the values that each read and computed, and its source line."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Operator", "OperatorTrace", "SourceLine", "TracedValue"]


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a user's code, and the expression on it that ran."""

    file: str
    line: int
    function: str
    columns: tuple[int, int, int] | None = None
    """Start column, last line and end column of the expression, in bytes; None where Python does not know."""

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    @property
    def text(self) -> str:
        """The whole line, without indentation; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def parts(self) -> list[SourceLine]:
        """Each line of an expression that spans several, as in a call with an argument on each line."""
        last = self.line if self.columns is None else self.columns[1]
        return [self, *(SourceLine(self.file, number, self.function) for number in range(self.line + 1, last + 1))]

    @property
    def expression(self) -> str:
        """The expression alone if its position is known, else the whole line."""
        if self.columns is None:
            return self.text
        start, last, end = self.columns
        lines = [linecache.getline(self.file, number).rstrip("\n").encode() for number in range(self.line, last + 1)]
        if not any(lines):
            return ""
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][start:]
        return " ".join(line.decode(errors="replace").strip() for line in lines)


@dataclass(slots=True)
class TracedValue:
    """A tensor as an operator read or made it."""

    number: int
    producer: int | None
    """Number of the operator that made it; None for an input, a parameter, a buffer or a constant."""
    name: str
    """Name of an input, parameter or buffer; empty for other values."""
    dtype: str
    shape: tuple[int, ...]
    tensor: Any
    """The framework's tensor, with the values of that moment."""
    differentiable: bool = False
    """Whether autograd passes a gradient to it. Known when the forward has ended."""
    uninitialised: bool = False
    """Whether it is memory that nothing has written to, so that its elements mean nothing."""
    replaced: int | None = None
    """Number of the value that was in the same memory before an operator wrote this one in place."""


@dataclass(slots=True)
class Operator:
    """One call of an operator."""

    number: int
    name: str
    """Name without namespace and overload: "mul", "softmax"; the class of an autograd Function."""
    phase: str
    """forward | backward"""
    module: str
    """Name of the innermost module that ran it, relative to the traced module."""
    line: SourceLine | None
    callers: Sequence[SourceLine]
    """The lines that called the function of `line`, the innermost first."""
    inputs: Sequence[int]
    """Numbers of the values it read, in the order of its arguments."""
    outputs: Sequence[int]
    arguments: Sequence[str]
    """Its plain arguments, in words: "dim=-1"."""
    writes: bool = False
    """Whether it changed one of its inputs in place."""
    moves: bool = False
    """Whether it only moves or renames elements: views, copies, casts."""
    is_function: bool = False
    """Whether it is an autograd Function of a user, whose backward is code of its own."""
    part_of: int | None = None
    """Number of the fused operator that this one is a part of; None for an operator that ran."""
    call: Any = None
    """The framework's own data to run it again."""


@dataclass(slots=True)
class OperatorTrace:
    """All operators of one call, in execution order."""

    operators: list[Operator] = field(default_factory=list)
    values: list[TracedValue] = field(default_factory=list)

    def producer(self, value: int) -> Operator | None:
        """Return the operator that made a value; None for a source."""
        number = self.values[value].producer
        return None if number is None else self.operators[number]
