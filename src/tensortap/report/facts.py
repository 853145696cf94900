"""What the pages about a run start from: plain data, gathered by whoever opened the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensortap.records import Coverage

__all__ = ["RunFacts"]


@dataclass(frozen=True)
class RunFacts:
    """A run without its records."""

    path: str
    info: Mapping[str, Any]
    """run.json as it is."""
    finished: bool
    steps: Sequence[int]
    ranks: Sequence[int]
    records: int
    tensors: int
    """Distinct ones: several records may have seen the same."""
    kept: int
    """Records whose bytes are on disk."""
    bytes_on_disk: int
    notices: Sequence[str] = ()
    coverage: Mapping[int, Sequence[Coverage]] = field(default_factory=dict)
    """By rank."""
