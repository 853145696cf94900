"""The numbers of all pairs that judging needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Floats", "IsolatedPairs", "Pairs"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class IsolatedPairs:
    """Further columns over pairs whose modules ran on the reference's own inputs."""

    forced: npt.NDArray[np.bool_]
    """Where the reference's values replaced the candidate's, so that no error propagated."""
    cast: npt.NDArray[np.bool_]
    """Where these values were cast from another dtype, so that they are rounded."""


@dataclass(frozen=True)
class Pairs:
    """Columns over all pairs, in execution order."""

    error: Floats
    """The relative L2 error, or the worst row's over `row_gain` if that is more; 0 where equal, NaN where unknown."""
    row_gain: Floats
    """Factor by which one row may exceed the tolerance."""
    l2: Floats
    """The reference's norm."""
    std: Floats
    """The reference's standard deviation."""
    distance: Floats
    """|candidate - reference|; NaN where unknown."""
    elements: npt.NDArray[np.int64]
    equal: npt.NDArray[np.bool_]
    nonfinite: npt.NDArray[np.bool_]
    """One side has NaN or Inf where the other has not."""
    reshaped: npt.NDArray[np.bool_]
    dimensions: npt.NDArray[np.int64]
    base: Floats
    """The tolerance if all sources are right."""
    limits: Mapping[int, str] = field(default_factory=dict)
    """Pairs about which too little is known to call them right, and why. Their error is a lower bound, or NaN."""
    isolated: IsolatedPairs | None = None
    """None for a free run."""
