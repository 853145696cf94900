"""How one model's names and layouts were mapped onto another's: the plain data behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LeftOut", "Placed", "Placements"]


@dataclass(frozen=True, slots=True)
class Placed:
    """Something of the reference, and what it is in the candidate."""

    reference: str
    candidate: str
    how: str
    """By what it was found: root, same name, rename, rule, structure, shape, order, elimination, values."""
    change: str = ""
    """What has to be done to the candidate's to read it as the reference's."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that has no counterpart, and why."""

    side: str
    name: str
    why: str


@dataclass(frozen=True)
class Placements:
    """How the candidate was mapped onto the reference: names, tensors, arguments, and what could not be placed."""

    modules: Sequence[Placed] = ()
    tensors: Sequence[Placed] = ()
    values: Sequence[Placed] = ()
    left: Sequence[LeftOut] = ()
    """Modules and tensors that nothing belongs to."""
    ignored: Sequence[LeftOut] = ()
    """Tensors that a rule says have no counterpart."""
    unused: Sequence[str] = ()
    """Rules that fitted nothing."""

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)
