"""The path of an operator's record: which operator it was, on which line, and which of several like it.

    softmax@attention.py:48          the first softmax of that line in a call of the module
    softmax@attention.py:48#2        the second
    native_layer_norm@block.py:9[1]  its second result; in backward, the gradient of its second operand
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["OperatorPath", "parse_operator"]

_FORM = re.compile(
    r"(?P<name>.*?)(?:@(?P<place>[^@#\[~]*))?(?:#(?P<count>\d+))?(?:\[(?P<index>\d+)\])?(?P<again>~\d+)?"
)


class OperatorPath(NamedTuple):
    """An operator within a call of a module."""

    name: str
    place: str = ""
    """File and line, "attention.py:48"; empty if no Python code called it."""
    count: int = 1
    """Which one of those with the same name and line."""
    index: int = 0
    """Which of its results; in backward, which of its operands the gradient is for."""
    again: str = ""
    """"~2" in a second backward through the same graph."""

    def __str__(self) -> str:
        place = f"@{self.place}" if self.place else ""
        count = f"#{self.count}" if self.count > 1 else ""
        index = f"[{self.index}]" if self.index else ""
        return f"{self.name}{place}{count}{index}{self.again}"

    @property
    def in_words(self) -> str:
        """Name and line for people: "softmax in attention.py:48"."""
        return f"{self.name.strip('_')} in {self.place}" if self.place else self.name.strip("_")


def parse_operator(path: str) -> OperatorPath:
    """Return the parts of a path.

    >>> parse_operator("softmax@attention.py:48#2")
    OperatorPath(name='softmax', place='attention.py:48', count=2, index=0, again='')
    """
    found = _FORM.fullmatch(path)
    if found is None:
        return OperatorPath(path)
    count, index = int(found["count"] or 1), int(found["index"] or 0)
    return OperatorPath(found["name"], found["place"] or "", count, index, found["again"] or "")
