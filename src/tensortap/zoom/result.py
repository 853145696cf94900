"""The result of zooming into a module: a sentence, the first difference, and the aligned operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensortap.core.operators import Operator, SourceLine
from tensortap.core.records import Verdict
from tensortap.zoom.finding import OperatorFinding

__all__ = ["OperatorRow", "Zoom"]


@dataclass(frozen=True)
class OperatorRow:
    """An operator of the reference beside the candidate's."""

    reference: Operator | None
    candidate: Operator | None
    status: str
    """equal | close | differs | reference only | candidate only"""
    rel_l2: float
    """Relative distance of their results; NaN where there is none."""
    reference_dtype: str
    candidate_dtype: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "rel_l2": self.rel_l2,
            "reference": _side(self.reference, self.reference_dtype),
            "candidate": _side(self.candidate, self.candidate_dtype),
        }


@dataclass(frozen=True)
class Zoom:
    """The operators of two modules on the same inputs. `str()` of it is the sentence."""

    verdict: Verdict
    """match | imprecise | diverged"""
    sentence: str
    first: OperatorFinding | None
    rows: Sequence[OperatorRow]
    outputs: Mapping[str, float]
    """Relative distance of each output, and of each gradient, by name."""
    notes: Sequence[str] = ()
    module: str = ""

    def __str__(self) -> str:
        return self.sentence

    @property
    def line(self) -> SourceLine | None:
        """The candidate's line to inspect; None if nothing differs."""
        return None if self.first is None else self.first.line

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        first = self.first
        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            "module": self.module,
            "kind": None if first is None else first.kind,
            "line": None if first is None else _line(first.line),
            "reference_line": None if first is None else _line(first.reference_line),
            "outputs": dict(self.outputs),
            "notes": list(self.notes),
            "operators": [row.as_dict() for row in self.rows],
        }


def _side(operator: Operator | None, dtype: str) -> dict[str, Any] | None:
    if operator is None:
        return None
    return {
        "operator": operator.name,
        "phase": operator.phase,
        "module": operator.module,
        "dtype": dtype,
        "arguments": list(operator.arguments),
        "line": _line(operator.line),
    }


def _line(line: SourceLine | None) -> dict[str, Any] | None:
    if line is None:
        return None
    return {"file": line.file, "line": line.line, "function": line.function, "code": line.expression}
