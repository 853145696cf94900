"""Details of a pair, element by element: histograms, a map of the differences, the worst elements.

Plain NumPy works on blocks, so that memory does not grow with the tensors. `pairs.reference` defines equality, finite
elements and ULPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.details import Element, Histogram, Needed, TileMap, Ulps, Window
from tensortap.kernels.pairs.reference import part_name
from tensortap.kernels.summary.reference import components

__all__ = ["Folded", "PairInspection", "histogram_of", "inspect_pair", "map_of", "ulps_apart"]

BINS = 64
TILES = 64
WORST = 20
_BLOCK = 1 << 19
_NARROW = 16  # with fewer columns, a dimension is joined with the previous one
_HEAVY = 20.0  # an element this many times the root mean square makes the scale logarithmic
_MOST_POWER = 24

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PairInspection:
    """The result of one pass over both tensors."""

    histogram: Histogram
    ulps: Ulps
    map: TileMap
    worst: tuple[Element, ...]
    needed: Needed


@dataclass(frozen=True)
class Folded:
    """A tensor of any shape as a matrix. Its columns are the last dimension, and earlier ones while that is narrow."""

    shape: tuple[int, ...]
    rows: int
    columns: int
    words: str

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Folded:
        split = max(0, len(shape) - 1)
        while split > 0 and math.prod(shape[split:]) < _NARROW:
            split -= 1
        parts = ["×".join(map(str, part)) or "1" for part in (shape[:split], shape[split:])]
        words = f"rows {parts[0]}, columns {parts[1]}"
        return cls(shape, math.prod(shape[:split]), math.prod(shape[split:]), words)

    @property
    def window(self) -> Window:
        """Return the window that covers the whole matrix."""
        return Window(0, self.rows, 0, self.columns)

    def clipped(self, window: Window) -> Window:
        """Return the part of a window that lies within the matrix."""
        top, left = (
            min(max(0, at), max(0, most - 1)) for at, most in ((window.top, self.rows), (window.left, self.columns))
        )
        return Window(
            top, max(top + 1, min(window.bottom, self.rows)), left, max(left + 1, min(window.right, self.columns))
        )

    def blocks(self, window: Window) -> Iterator[Window]:
        """Yield the window in pieces of bounded size, in the order of the elements."""
        if not self.rows or not self.columns:
            return
        width = min(window.right - window.left, _BLOCK)
        height = max(1, _BLOCK // width)
        for top in range(window.top, window.bottom, height):
            for left in range(window.left, window.right, width):
                yield Window(top, min(top + height, window.bottom), left, min(left + width, window.right))


def inspect_pair(
    reference: Array, candidate: Array, bounds: tuple[float, float, float], tolerances: tuple[float, float]
) -> PairInspection:
    """Inspect all elements in one pass.

    `bounds` are the least and the greatest finite element of either side, and the reference's root mean square, as
    summaries have them.
    """
    names = part_name(reference.dtype), part_name(candidate.dtype)
    r, c = components(reference), components(candidate)
    folded = Folded.of(r.shape)
    r, c = (side.reshape(folded.rows, folded.columns) for side in (r, c))
    bins = _Bins.over(*bounds)
    counts = np.zeros((2, BINS), np.int64)
    powers = np.zeros(_MOST_POWER + 3, np.int64)
    tiles = _Tiles(folded.window)
    worst = _Worst()
    needed = np.zeros(3)
    for piece in folded.blocks(folded.window):
        ours, theirs = (side[piece.top : piece.bottom, piece.left : piece.right] for side in (r, c))
        block = _Block.of(ours, theirs, names)
        for at, values in enumerate((block.reference, block.candidate)):
            counts[at] += bins.count(values)
        powers += block.powers()
        tiles.take(piece, block.gaps)
        worst.take(block, piece.top * folded.columns + piece.left)
        needed = np.maximum(needed, block.needed(tolerances[0]))
    last = int(np.flatnonzero(powers)[-1]) if powers.any() else 0
    edges = np.array([0.0, *(2.0**power for power in range(last)), np.inf])
    return PairInspection(
        Histogram(bins.edges, counts[0], counts[1], bins.threshold),
        Ulps(edges, powers[: last + 1]),
        TileMap(tiles.values, (folded.rows, folded.columns), folded.window, folded.words),
        worst.elements(folded.shape),
        Needed(*needed.tolist()),
    )


def map_of(reference: Array, candidate: Array, window: Window | None = None) -> TileMap:
    """Return the map of a part of the folded tensor."""
    names = part_name(reference.dtype), part_name(candidate.dtype)
    r, c = components(reference), components(candidate)
    folded = Folded.of(r.shape)
    r, c = (side.reshape(folded.rows, folded.columns) for side in (r, c))
    part = folded.window if window is None else folded.clipped(window)
    tiles = _Tiles(part)
    for piece in folded.blocks(part):
        ours, theirs = (side[piece.top : piece.bottom, piece.left : piece.right] for side in (r, c))
        tiles.take(piece, _Block.of(ours, theirs, names).gaps)
    return TileMap(tiles.values, (folded.rows, folded.columns), part, folded.words)


def histogram_of(array: Array, bounds: tuple[float, float, float], bins: int = BINS) -> Histogram:
    """Count the finite elements of one tensor in each bin; see `inspect_pair` for the bounds."""
    flat = components(array).reshape(-1)
    scale = _Bins.over(*bounds, bins)
    counts = np.zeros(bins, np.int64)
    for start in range(0, flat.size, _BLOCK):
        counts += scale.count(flat[start : start + _BLOCK].astype(np.float64))
    return Histogram(scale.edges, counts, None, scale.threshold)


def ulps_apart(reference: Array, candidate: Array, names: tuple[str, str]) -> Floats:
    """Return the number of steps between elements in the coarser dtype; inf where one is not finite in it."""
    floats = [name for name in names if dtypes.numpy_dtype(name).kind not in "iub"]
    if not floats:
        gaps: Floats = np.abs(candidate.astype(np.float64) - reference.astype(np.float64))
        return gaps
    coarser = dtypes.numpy_dtype(max(floats, key=lambda name: float(ml_dtypes.finfo(dtypes.numpy_dtype(name)).eps)))
    with np.errstate(over="ignore", invalid="ignore"):
        values = [np.ascontiguousarray(side.astype(coarser)) for side in (reference, candidate)]
    word = np.dtype(f"i{coarser.itemsize}")
    most = np.iinfo(word).max
    places = []
    for side in values:
        bits = side.view(word)
        size = (bits & word.type(most)).astype(np.int64)
        places.append(np.where(bits < 0, -size, size))
    left, right = places
    # With equal signs, the difference of two 64-bit ranks fits; across zero it may not, and float64 is exact enough.
    apart = np.abs(np.where((left < 0) == (right < 0), right - left, 0)).astype(np.float64)
    across = (left < 0) != (right < 0)
    apart = np.where(across, np.abs(left).astype(np.float64) + np.abs(right).astype(np.float64), apart)
    with np.errstate(invalid="ignore"):
        known = np.isfinite(values[0].astype(np.float64)) & np.isfinite(values[1].astype(np.float64))
    return np.where(known, apart, np.inf)


@dataclass(frozen=True)
class _Block:
    """Two pieces of one shape as float64, with the differences of their elements."""

    reference: Floats
    candidate: Floats
    gaps: Floats
    ulps: Floats

    @classmethod
    def of(cls, ours: Array, theirs: Array, names: tuple[str, str]) -> _Block:
        r, c = ours.astype(np.float64), theirs.astype(np.float64)
        with np.errstate(invalid="ignore"):
            same = (r == c) | (np.isnan(r) & np.isnan(c))
            finite = np.isfinite(r) & np.isfinite(c)
            gaps = np.where(same, 0.0, np.where(finite, np.abs(c - r), np.inf))
            ulps = np.where(same, 0.0, np.where(finite, ulps_apart(ours, theirs, names), np.inf))
        return cls(r, c, gaps, ulps)

    def powers(self) -> npt.NDArray[np.int64]:
        """Count elements by their distance in ULP: 0, below 2, below 4, ..., and all beyond."""
        powers = np.where(self.ulps < 1, 0, np.frexp(np.minimum(self.ulps, 2.0**_MOST_POWER))[1])
        powers = np.where(np.isinf(self.ulps), _MOST_POWER + 2, powers)
        return np.bincount(powers.reshape(-1), minlength=_MOST_POWER + 3)

    def needed(self, rtol: float) -> list[float]:
        """Return the greatest difference, the greatest relative one, and the greatest beyond rtol."""
        if not self.gaps.size:
            return [0.0, 0.0, 0.0]
        size = np.abs(self.reference)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(self.gaps > 0, self.gaps / size, 0.0)
            beyond = np.where(self.gaps > 0, self.gaps - rtol * size, 0.0)
        relative[np.isinf(self.gaps)] = beyond[np.isinf(self.gaps)] = np.inf
        return [float(self.gaps.max()), float(relative.max()), float(max(0.0, beyond.max()))]


@dataclass(frozen=True)
class _Bins:
    """Bins that both sides share, equally wide on a linear or a symmetric logarithmic scale."""

    edges: Floats
    threshold: float | None

    @classmethod
    def over(cls, low: float, high: float, size: float, bins: int = BINS) -> _Bins:
        if not (math.isfinite(low) and math.isfinite(high)):
            low, high = 0.0, 0.0
        if low == high:
            margin = abs(low) / 2 or 0.5
            low, high = low - margin, high + margin
        if not math.isfinite(high - low):  # the whole range of float64
            low, high = low / 2, high / 2
        if size > 0 and max(abs(low), abs(high)) > _HEAVY * size:
            threshold = size / _HEAVY
            ends = _bent(np.array([low, high]), threshold)
            places = np.linspace(ends[0], ends[1], bins + 1)
            edges = np.sign(places) * threshold * (10 ** np.abs(places) - 1)
            edges[0], edges[-1] = low, high
            return cls(edges, threshold)
        return cls(np.linspace(low, high, bins + 1), None)

    def count(self, values: Floats) -> npt.NDArray[np.int64]:
        bins, (first, last) = len(self.edges) - 1, self.edges[[0, -1]]
        values = np.clip(values[np.isfinite(values)], first, last)
        bent = values
        if self.threshold is not None:
            bent = _bent(values, self.threshold)
            first, last = _bent(self.edges[[0, -1]], self.threshold)
        places = np.clip(((bent - first) * (bins / (last - first))).astype(np.int64), 0, bins - 1)
        # Rounding may put a value on an edge into the neighbouring bin.
        places -= values < self.edges[places]
        places += (values >= self.edges[places + 1]) & (places < bins - 1)
        return np.bincount(places, minlength=bins)


def _bent(values: Floats, threshold: float) -> Floats:
    bent: Floats = np.sign(values) * np.log10(1 + np.abs(values) / threshold)
    return bent


class _Tiles:
    """The greatest value in each tile of a window."""

    def __init__(self, window: Window) -> None:
        self._window = window
        height, width = window.bottom - window.top, window.right - window.left
        self._cuts = [_cuts(size) for size in (height, width)]
        self.values = np.zeros([len(cuts) for cuts in self._cuts])

    def take(self, piece: Window, values: Floats) -> None:
        if not values.size:
            return
        top, left = piece.top - self._window.top, piece.left - self._window.left
        for axis, begin in ((0, top), (1, left)):
            ends = begin + values.shape[axis]
            cuts = self._cuts[axis]
            first = int(np.searchsorted(cuts, begin, side="right")) - 1
            last = int(np.searchsorted(cuts, ends))
            starts = np.maximum(cuts[first:last] - begin, 0)
            values = np.maximum.reduceat(values, starts, axis=axis)
            if axis == 0:
                top = first
            else:
                left = first
        there = self.values[top : top + values.shape[0], left : left + values.shape[1]]
        np.maximum(there, values, out=there)


def _cuts(size: int) -> npt.NDArray[np.int64]:
    """Return the positions at which the tiles along one axis begin."""
    tiles = min(max(size, 0), TILES)
    return np.arange(tiles) * size // max(tiles, 1)


class _Worst:
    """The elements with the greatest differences so far."""

    def __init__(self) -> None:
        self._rows = np.empty((0, 5))  # gap, place, reference, candidate, ulp

    def take(self, block: _Block, start: int) -> None:
        """Add a contiguous block that begins at element `start`."""
        gaps = block.gaps.reshape(-1)
        least = self._rows[-1, 0] if len(self._rows) == WORST else 0.0
        found = np.flatnonzero(gaps > least)
        if len(found) > WORST:
            edge = np.partition(gaps[found], len(found) - WORST)[len(found) - WORST]
            above = found[gaps[found] > edge]
            found = np.concatenate([above, found[gaps[found] == edge][: WORST - len(above)]])
        values = (block.reference, block.candidate, block.ulps)
        rows = np.stack([gaps[found], found + float(start), *(value.reshape(-1)[found] for value in values)], axis=1)
        rows = np.concatenate([self._rows, rows])
        self._rows = rows[np.lexsort((rows[:, 1], -rows[:, 0]))][:WORST]

    def elements(self, shape: tuple[int, ...]) -> tuple[Element, ...]:
        return tuple(
            Element(tuple(int(i) for i in np.unravel_index(int(place), shape)), r, c, c - r, ulp)
            for _, place, r, c, ulp in self._rows.tolist()
        )
