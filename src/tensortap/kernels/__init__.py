"""A tensor in, its summary out. `reference` is the definition, `cpu` the fast way.

Importing this room costs nothing: the compiler behind `cpu` is loaded with the first summary.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from tensortap.core.records import Summary

if TYPE_CHECKING:
    from tensortap.kernels.pairs.reference import PairMeasure

__all__ = ["borrow_threads", "difference", "release", "summarize"]


def summarize(array: npt.NDArray[Any], threads: int | None = None) -> Summary:
    """The summary of an array in main memory; see `reference` for what each field means."""
    from tensortap.kernels.summary import cpu

    return cpu.summarize(array, threads)


def difference(
    reference: npt.NDArray[Any],
    candidate: npt.NDArray[Any],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    size: float | None = None,
) -> PairMeasure:
    """How far two arrays are apart; see `pairs.difference`."""
    from tensortap.kernels.pairs import cpu as pairs

    return pairs.difference(reference, candidate, rtol=rtol, atol=atol, size=size)


def borrow_threads(library: str | None, threads: int) -> None:
    """Summaries of the calling thread run on a framework's own OpenMP threads, where its library is known."""
    if library is not None:
        from tensortap.kernels.summary import cpu

        cpu.borrow(library, threads)


def release() -> None:
    """End the idle helper threads; the next summary starts them again."""
    for name in ("summary.cpu", "pairs.cpu"):
        if (loaded := sys.modules.get(f"tensortap.kernels.{name}")) is not None:
            loaded.release()
