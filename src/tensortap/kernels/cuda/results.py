"""The result of a device's kernels for one tensor, and its conversion to statistics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.kernels.summary.reference import BUCKETS

__all__ = ["RESULT", "columns", "named_columns", "new_columns"]

RESULT = np.dtype(
    [
        ("sketch", "<f4", BUCKETS),
        ("about", "<f8"),
        ("sum", "<f8"),
        ("squares", "<f8"),
        ("l1", "<f8"),
        ("low", "<f8"),
        ("high", "<f8"),
        ("digest", "<u8"),
        ("nan", "<u8"),
        ("posinf", "<u8"),
        ("neginf", "<u8"),
        ("zeros", "<u8"),
        ("edge", "<u8"),
        ("probe", "<u4"),
        ("unchanged", "<u4"),
    ]
)
"""The result for one tensor, as `common.cuh` has it; sums are of x - about."""


_COUNTS = "elements", "nan", "posinf", "neginf", "zeros", "edge", "digest"
_MOMENTS = "min", "max", "mean", "std", "l1", "l2"


def new_columns(rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float32]]:
    """Return room for the columns of this number of rows, which `native/collecting.h` fills in: counts, moments,
    sketches.
    """
    counts, moments = np.empty((len(_COUNTS), rows), np.int64), np.empty((len(_MOMENTS), rows))
    return counts, moments, np.empty((rows, BUCKETS), np.float32)


def named_columns(
    counts: npt.NDArray[np.int64], moments: npt.NDArray[np.float64], sketches: npt.NDArray[np.float32]
) -> dict[str, npt.NDArray[Any]]:
    """Return the columns in the form of `columns`."""
    named: dict[str, npt.NDArray[Any]] = dict(zip(_COUNTS, counts, strict=True))
    named["digest"] = named["digest"].view(np.uint64)
    return {**named, **dict(zip(_MOMENTS, moments, strict=True)), "sketch": sketches}


def columns(results: npt.NDArray[Any], elements: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
    """Return the statistics by name, as columns, from results of `finish` in host memory."""
    counts = {name: results[name].astype(np.int64) for name in ("nan", "posinf", "neginf", "zeros", "edge")}
    finite = elements - counts["nan"] - counts["posinf"] - counts["neginf"]
    ordinary = finite - counts["edge"]
    low, high = results["low"].copy(), results["high"].copy()
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        along = results["sum"] / ordinary
        mean = results["about"] + along
        m2 = np.maximum(results["squares"] - results["sum"] * along, 0.0)
        constant = (low == high) & (counts["edge"] == 0)
        mean[constant], m2[constant] = low[constant], 0.0
        std = np.sqrt(m2 / ordinary)
        l2 = np.sqrt(m2 + ordinary * np.square(mean))
    low[finite == 0] = high[finite == 0] = math.nan
    empty = ordinary == 0
    mean[empty] = std[empty] = math.nan
    l2[empty] = 0.0
    moments = {"min": low, "max": high, "mean": mean, "std": std, "l1": results["l1"], "l2": l2}
    return {"elements": elements, **counts, **moments, "digest": results["digest"], "sketch": results["sketch"]}
