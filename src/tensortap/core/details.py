"""Details: a pair or a record inspected element by element, as plain data. All arrays are small."""

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
    """The summary of one tensor without its sketch.

    A tensor that is compared in another layout is described in that layout if its elements were read, else as stored.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Number of finite elements in each bin, for each side; both sides have the same bins."""

    edges: Floats
    reference: Counts
    candidate: Counts | None
    """None if there is only one tensor."""
    threshold: float | None
    """None: bins are equally wide. Otherwise they are equally wide in sign(x) · log10(1 + |x| / threshold)."""


@dataclass(frozen=True, slots=True)
class Ulps:
    """Number of elements by their distance in units in the last place: edges[i] <= ulp < edges[i + 1]."""

    edges: Floats
    counts: Counts


class Window(NamedTuple):
    """A rectangle of a tensor that is folded to two dimensions."""

    top: int
    bottom: int
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class TileMap:
    """The greatest difference in each tile of a folded tensor; inf where only one side is not finite."""

    tiles: Floats
    whole: tuple[int, int]
    window: Window
    folded: str
    """Description of the rows and columns."""


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
    """The smallest tolerances with which all elements pass |c - r| <= atol + rtol * |r|."""

    atol: float
    """Smallest atol if rtol is 0."""
    rtol: float
    """Smallest rtol if atol is 0; inf where the reference is 0 and the candidate is not."""
    atol_with_rtol: float
    """Smallest atol with the default rtol."""


@dataclass(frozen=True, slots=True)
class Detail:
    """One pair or record in detail; a part that is unknown is None."""

    rows: tuple[int, ...]
    """Rows of the table that saw the same tensors."""
    whole: bool
    """Whether it was inspected element by element."""
    reference: TensorFacts
    candidate: TensorFacts | None = None
    difference: Difference | None = None
    judged: float | None = None
    """The error that was judged: the relative error, or the worst row's, scaled to the whole tensor."""
    tolerances: tuple[float, float] | None = None
    """rtol and atol that decide which elements are mismatched."""
    histogram: Histogram | None = None
    ulps: Ulps | None = None
    map: TileMap | None = None
    worst: tuple[Element, ...] | None = None
    needed: Needed | None = None
    why: str = ""
    """Why it was not inspected element by element."""
    damaged: bool = False
    """Whether its elements were kept but cannot be read."""

    @property
    def row(self) -> int:
        return self.rows[0]
