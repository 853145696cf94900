"""What is asked of a device that measures pairs, such as a GPU: the same records that `pairs` makes, of larger pieces.

A device hands out slots. Into a slot's memory the bytes of a piece are read, both sides one after the other; it is
started, works by itself, and is asked for its record before it is used again. `pairs.join` makes the whole of records,
whoever made them, so a piece may be of any size and what remains small may be left to the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tensortap.core import dtypes
from tensortap.kernels.pairs.reference import Rows

if TYPE_CHECKING:
    from tensortap.kernels.pairs.cpu import How, Partial

__all__ = ["ALIGNED", "PairDevice", "PairPiece", "PairSlot"]

ALIGNED = 64
"""Bytes to a multiple of which the second side begins."""


@dataclass(frozen=True, slots=True)
class PairPiece:
    """Elements `start` to `start` + `elements` of two tensors in C order."""

    reference: str
    """Its dtype."""
    candidate: str
    start: int
    elements: int
    rows: Rows
    rtol: float | None = None
    atol: float | None = None

    @property
    def how(self) -> How:
        from tensortap.kernels.pairs.cpu import how_of  # loads the compiler

        return how_of(dtypes.numpy_dtype(self.reference), dtypes.numpy_dtype(self.candidate))

    @property
    def spans(self) -> tuple[slice, slice]:
        """Where in a slot's memory each side is."""
        sizes = [self.elements * dtypes.numpy_dtype(name).itemsize for name in (self.reference, self.candidate)]
        second = -(-sizes[0] // ALIGNED) * ALIGNED
        return slice(0, sizes[0]), slice(second, second + sizes[1])


class PairSlot(Protocol):
    """Room for one piece."""

    memory: memoryview
    """Bytes to read a piece into, at its `spans`."""

    def start(self, piece: PairPiece) -> None:
        """Begin with what is in the memory, which must not change until `record` was called."""

    def record(self) -> Partial:
        """Wait until it is done. `pairs.join` takes what is returned."""


class PairDevice(Protocol):
    """Something that measures pairs."""

    def slot(self, nbytes: int) -> PairSlot:
        """A slot for pieces of so many bytes on both sides together."""
