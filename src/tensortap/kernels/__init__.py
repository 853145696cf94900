"""Kernels: a tensor to its summary, a pair of tensors to its difference.

`summary.reference` and `pairs.reference` are the definitions, in NumPy. The fast kernels are tested against them.
Importing this package is cheap: the first summary loads the compiler.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from tensortap.core.machine import PORTABLE
from tensortap.core.records import Summary

if TYPE_CHECKING:
    from tensortap.core.placement import Placement
    from tensortap.kernels.pairs.reference import PairMeasure

__all__ = ["borrow_threads", "difference", "release", "summarize"]


def summarize(array: npt.NDArray[Any], threads: int | None = None, *, placement: Placement | None = None) -> Summary:
    """Return the summary of an array in host memory; `summary.reference` defines every field.

    With a placement, it is the summary of a part: digest and sketch belong to the positions in the whole.
    """
    from tensortap.kernels.summary import cpu

    return cpu.summarize(array, threads, placement)


def difference(
    reference: npt.NDArray[Any],
    candidate: npt.NDArray[Any],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    size: float | None = None,
) -> PairMeasure:
    """Measure how far two arrays are apart; see `pairs.cpu.difference`."""
    from tensortap.kernels.pairs import cpu as pairs

    return pairs.difference(reference, candidate, rtol=rtol, atol=atol, size=size)


def borrow_threads(library: str | None, threads: int) -> None:
    """Run summaries of the calling thread on a framework's own OpenMP threads, if its library is known."""
    if library is not None and not PORTABLE:
        from tensortap.kernels.summary import cpu

        cpu.borrow(library, threads)


def release() -> None:
    """End the idle helper threads; the next call starts new ones."""
    for name in ("summary.cpu", "pairs.cpu"):
        if (loaded := sys.modules.get(f"tensortap.kernels.{name}")) is not None:
            loaded.release()
