"""How one model's names and layouts were mapped onto another's: the plain data behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["MappedName", "NameMapping", "UnmappedName"]


@dataclass(frozen=True, slots=True)
class MappedName:
    """Something of the reference, and what it is in the candidate."""

    reference: str
    candidate: str
    how: str
    """By what it was found: root, same name, rename, rule, structure, shape, order, elimination, values."""
    change: str = ""
    """What has to be done to the candidate's to read it as the reference's."""


@dataclass(frozen=True, slots=True)
class UnmappedName:
    """Something that has no counterpart, and why."""

    side: str
    name: str
    why: str


@dataclass(frozen=True)
class NameMapping:
    """How the candidate was mapped onto the reference: names, tensors, arguments, and what could not be placed."""

    modules: Sequence[MappedName] = ()
    tensors: Sequence[MappedName] = ()
    values: Sequence[MappedName] = ()
    left: Sequence[UnmappedName] = ()
    """Modules and tensors that nothing belongs to."""
    ignored: Sequence[UnmappedName] = ()
    """Tensors that a rule says have no counterpart."""
    unused: Sequence[str] = ()
    """Rules that fitted nothing."""

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)
