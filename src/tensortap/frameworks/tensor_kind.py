"""TensorKind: the properties that plain tensors of one dtype and shape share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["TensorKind"]


@dataclass(frozen=True, slots=True, eq=False)
class TensorKind:
    """The properties that plain tensors of one dtype and shape share. There is one object for each kind in use."""

    dtype: Any
    """The framework's own dtype."""
    shape: tuple[int, ...]
    name: str
    """The name of the dtype."""
    elements: int
    nbytes: int
    layout: int = 0
    """For host memory, see `kernels.summary.batch.layout_address`."""
