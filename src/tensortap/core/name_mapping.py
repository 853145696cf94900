"""The mapping of one model's names and layouts onto another's, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["MappedName", "NameMapping", "UnmappedName"]


@dataclass(frozen=True, slots=True)
class MappedName:
    """A name of the reference and its counterpart in the candidate."""

    reference: str
    candidate: str
    how: str
    """The method that found it: root, same name, rename, rule, structure, shape, order, elimination, values."""
    change: str = ""
    """The conversion that turns the candidate's tensor into the reference's layout."""


@dataclass(frozen=True, slots=True)
class UnmappedName:
    """A name without a counterpart, and why it has none."""

    side: str
    name: str
    why: str


@dataclass(frozen=True)
class NameMapping:
    """The mapping of the candidate onto the reference: modules, tensors, values, and names without a counterpart."""

    modules: Sequence[MappedName] = ()
    tensors: Sequence[MappedName] = ()
    values: Sequence[MappedName] = ()
    left: Sequence[UnmappedName] = ()
    """Modules and tensors without a counterpart."""
    ignored: Sequence[UnmappedName] = ()
    """Tensors that have no counterpart according to a rule."""
    unused: Sequence[str] = ()
    """Rules that matched nothing."""

    def as_dict(self) -> dict[str, Any]:
        """Return the mapping as an object for JSON."""
        return asdict(self)
