"""The path of an operator's record: the operator, its source line, and its number among equal operators there.

softmax@attention.py:48          the first softmax of that line in a call of the module
softmax@attention.py:48#2        the second
native_layer_norm@block.py:9[1]  its second result
grad mul@block.py:12[1]          the gradient of its second operand, which its backward computed
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["OperatorPath", "OperatorPlace", "parse_operator"]

_FORM = re.compile(
    r"(?P<gradient>grad )?(?P<name>.*?)(?:@(?P<place>[^@#\[~]*))?"
    r"(?:#(?P<nth>\d+))?(?:\[(?P<part>\d+)\])?(?P<again>~\d+)?"
)


class OperatorPath(NamedTuple):
    """An operator within a call of a module."""

    name: str
    place: str = ""
    """File and line, "attention.py:48"; empty if no Python code called it."""
    nth: int = 1
    """Its number among operators with the same name and line."""
    part: int = 0
    """Index of the result; in backward, index of the operand that the gradient is for."""
    again: str = ""
    """"~2" in a second backward through the same graph."""
    gradient: bool = False
    """Whether it is a gradient that the operator's backward computed."""

    @property
    def operator(self) -> OperatorPath:
        """The operator itself, whichever of its records this is."""
        return self._replace(part=0, again="", gradient=False)

    def __str__(self) -> str:
        grad = "grad " if self.gradient else ""
        place = f"@{self.place}" if self.place else ""
        nth = f"#{self.nth}" if self.nth > 1 else ""
        part = f"[{self.part}]" if self.part else ""
        return f"{grad}{self.name}{place}{nth}{part}{self.again}"

    @property
    def in_words(self) -> str:
        """Name and line for people: "softmax in attention.py:48"."""
        return f"{self.name.strip('_')} in {self.place}" if self.place else self.name.strip("_")


@dataclass(frozen=True, slots=True)
class OperatorPlace:
    """The place at which the operators inside the module of a finding part."""

    reference: str
    """The reference's first operator whose result differs; empty if all that both sides have agree."""
    candidate: str
    """The candidate's counterpart, with its own line."""
    rel_l2: float
    missing: tuple[str, ...] = ()
    """Operators right before it that the candidate lacks."""
    added: tuple[str, ...] = ()
    """Operators right before it that the reference lacks."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            "candidate": self.candidate,
            "rel_l2": self.rel_l2,
            "missing": list(self.missing),
            "added": list(self.added),
        }


def parse_operator(path: str) -> OperatorPath:
    """Return the parts of a path.

    >>> parse_operator("softmax@attention.py:48#2")
    OperatorPath(name='softmax', place='attention.py:48', nth=2, part=0, again='', gradient=False)
    """
    found = _FORM.fullmatch(path)
    if found is None:
        return OperatorPath(path)
    nth, part = int(found["nth"] or 1), int(found["part"] or 0)
    return OperatorPath(found["name"], found["place"] or "", nth, part, found["again"] or "", bool(found["gradient"]))
