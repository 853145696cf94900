"""One pair of tensors, or one tensor, looked at closely: the plain data behind a drill-down. Arrays are small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core.records import Difference, Statistics

__all__ = ["TOO_LARGE", "Detail", "Element", "Histogram", "Needed", "TensorFacts", "TileMap", "Ulps", "Window"]

TOO_LARGE = "it is too large to be read for a page in one file; tensortap view shows it"

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TensorFacts(Statistics):
    """What is known of one tensor: its summary without the sketch. Of one that was read in another layout to be
    compared, as it was read if its elements were, else as it lies."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many finite elements of each side are in each bin; both sides have the same bins."""

    edges: Floats
    reference: Counts
    candidate: Counts | None
    """None if there is one tensor only."""
    threshold: float | None
    """None: bins are equally wide. Else they are so in sign(x) · log10(1 + |x| / threshold)."""


@dataclass(frozen=True, slots=True)
class Ulps:
    """How many elements are so many units in the last place apart: edges[i] <= ulp < edges[i + 1]."""

    edges: Floats
    counts: Counts


class Window(NamedTuple):
    """A part of a tensor that was folded to two dimensions."""

    top: int
    bottom: int
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class TileMap:
    """The greatest difference in each tile of a folded tensor; inf where one side alone is not finite."""

    tiles: Floats
    whole: tuple[int, int]
    window: Window
    folded: str
    """What rows and columns are, in words."""


@dataclass(frozen=True, slots=True)
class Element:
    """One element of both sides."""

    index: tuple[int, ...]
    reference: float
    candidate: float
    difference: float
    ulp: float


@dataclass(frozen=True, slots=True)
class Needed:
    """The smallest tolerances under which all elements would pass |c - r| <= atol + rtol * |r|."""

    atol: float
    """If rtol is 0."""
    rtol: float
    """If atol is 0; inf where the reference is 0 and the candidate is not."""
    atol_with_rtol: float
    """Beside the usual rtol."""


@dataclass(frozen=True, slots=True)
class Detail:
    """All that is known of one pair, or of one record; None where nothing is."""

    rows: tuple[int, ...]
    """The rows of the table that saw the very same tensors."""
    whole: bool
    """Looked at element by element."""
    reference: TensorFacts
    candidate: TensorFacts | None = None
    difference: Difference | None = None
    judged: float | None = None
    """What was held against the tolerance: the relative error, or the worst row's as what it would be of the whole."""
    tolerances: tuple[float, float] | None = None
    """rtol and atol that decide which elements are mismatched."""
    histogram: Histogram | None = None
    ulps: Ulps | None = None
    map: TileMap | None = None
    worst: tuple[Element, ...] | None = None
    needed: Needed | None = None
    why: str = ""
    """Why it was not looked at element by element."""
    damaged: bool = False
    """That is because its elements were kept, but cannot be read."""

    @property
    def row(self) -> int:
        return self.rows[0]
