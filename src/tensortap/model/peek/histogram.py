"""The histogram of one tensor: arrays for programs, a chart as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.records import Statistics
from tensortap.errors import UsageError
from tensortap.kernels import summarize
from tensortap.kernels.pairs.details import BINS, histogram_of
from tensortap.report.terminal import histogram as histogram_text
from tensortap.report.wording import count, dtype, shape

__all__ = ["BINS", "ValueHistogram", "value_histogram"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class ValueHistogram:
    """Number of finite elements in each bin: edges[i] <= x < edges[i + 1]; the last bin includes its end.

    It unpacks as `counts, edges`, like the result of `numpy.histogram`. `str()` returns a chart.
    """

    counts: npt.NDArray[np.int64]
    edges: npt.NDArray[np.float64]
    title: str
    statistics: Statistics
    logarithmic: bool
    """Whether bins are equally wide in the logarithm, for values over several orders of magnitude."""

    def __iter__(self) -> Iterator[Array]:
        return iter((self.counts, self.edges))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def text(self, width: int = 80) -> str:
        """Return the chart in lines of `width` characters; long numbers may exceed it."""
        found = self.statistics
        lost = [(found.nan, "NaN"), (found.posinf, "+Inf"), (found.neginf, "-Inf")]
        head = [self.title, *(f"{count(number)} {name}" for number, name in lost if number)]
        head += ["logarithmic bins"] if self.logarithmic else []
        bars = histogram_text.bars(self.counts, self.edges, width) if self.counts.any() else ["  no finite element"]
        return "\n".join([" · ".join(head), *bars])


def value_histogram(array: Array, title: str, bins: int = BINS) -> ValueHistogram:
    """Return the histogram of an array's finite elements, from the smallest to the largest."""
    if not isinstance(bins, int) or bins < 1:
        raise UsageError(f"bins: {bins!r} is not a number of bins: give an integer, 1 or more")
    summary = summarize(array)
    size = summary.l2 / max(1, summary.elements) ** 0.5
    found = histogram_of(array, (summary.min, summary.max, size), bins)
    title = f"{title} · {dtype(dtypes.name_of(array.dtype))} {shape(array.shape)}"
    return ValueHistogram(found.reference, found.edges, title, summary, found.threshold is not None)
