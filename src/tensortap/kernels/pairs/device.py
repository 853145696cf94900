"""The contract of a device that measures pairs, such as a GPU: it makes the records of `pairs.cpu`, of larger pieces.

A device provides slots. The bytes of a piece are read into a slot's memory, one side after the other. The slot is then
started, works asynchronously, and returns its record before it is used again. `pairs.cpu.join` joins records of any
origin, so pieces may have any size, and small tensors can stay on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tensortap.core import dtypes
from tensortap.kernels.pairs.reference import TensorRows

if TYPE_CHECKING:
    from tensortap.kernels.pairs.cpu import PairFormat, Partial

__all__ = ["ALIGNED", "PairDevice", "PairPiece", "PairSlot"]

ALIGNED = 64
"""Alignment of the second side in a slot's memory, in bytes."""


@dataclass(frozen=True, slots=True)
class PairPiece:
    """The elements `start` to `start + elements` of two tensors, in C order."""

    reference: str
    """Its dtype."""
    candidate: str
    start: int
    elements: int
    rows: TensorRows
    rtol: float | None = None
    atol: float | None = None

    @property
    def format(self) -> PairFormat:
        from tensortap.kernels.pairs.cpu import pair_format  # loads the compiler

        return pair_format(dtypes.numpy_dtype(self.reference), dtypes.numpy_dtype(self.candidate))

    @property
    def spans(self) -> tuple[slice, slice]:
        """Return the position of each side in a slot's memory."""
        sizes = [self.elements * dtypes.numpy_dtype(name).itemsize for name in (self.reference, self.candidate)]
        second = -(-sizes[0] // ALIGNED) * ALIGNED
        return slice(0, sizes[0]), slice(second, second + sizes[1])


class PairSlot(Protocol):
    """Memory and work queue for one piece at a time."""

    memory: memoryview
    """The bytes of a piece go here, at its `spans`."""

    def start(self, piece: PairPiece) -> None:
        """Begin to measure the piece in the memory, which must not change until `record` returns."""

    def record(self) -> Partial:
        """Wait for the result and return it, for `pairs.cpu.join`."""


class PairDevice(Protocol):
    """A device that measures pairs."""

    def slot(self, nbytes: int) -> PairSlot:
        """Return a slot for pieces of up to `nbytes` on both sides together."""
