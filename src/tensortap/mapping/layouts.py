"""Converts tensors between layouts: permuted axes, several tensors joined, a slice of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LayoutConversion", "Shape", "common_shape", "inverse", "same_elements"]

Shape = tuple[int, ...]


def inverse(axes: Sequence[int]) -> tuple[int, ...]:
    """Return the inverse of a permutation."""
    return tuple(int(axis) for axis in np.argsort(axes))


def same_elements(left: Shape, right: Shape) -> bool:
    """Whether two shapes differ only in axes of size one, so that the elements are in the same order."""
    return [size for size in left if size != 1] == [size for size in right if size != 1]


def common_shape(left: Shape, right: Shape) -> Shape | None:
    """Return the shape at which two values that differ only in axes of size one are compared; None if others differ.

    >>> common_shape((1, 12), (2, 12)), common_shape((2, 1, 1, 8), (2, 8)), common_shape((2, 12), (12, 2))
    ((2, 12), (2, 1, 1, 8), None)
    """
    if same_elements(left, right):
        return max(left, right, key=len)
    if prod(left) == 1 or prod(right) == 1:  # a single number is not a broadcast value
        return None
    longer, shorter = sorted((left, right), key=len, reverse=True)
    shorter = (1,) * (len(longer) - len(shorter)) + shorter
    pairs = list(zip(longer, shorter, strict=True))
    if any(one != other and 1 not in (one, other) for one, other in pairs):
        return None
    return tuple(max(sizes) for sizes in pairs) if prod(left) and prod(right) else None


@dataclass(frozen=True, slots=True)
class LayoutConversion:
    """Makes a target tensor from source tensors: slices each part, permutes it, joins all, reshapes the result."""

    parts: tuple[str, ...]
    """Full names of the source tensors; several are joined."""
    permute: tuple[int, ...] = ()
    axis: int = 0
    """The axis along which parts are joined, or one is sliced."""
    cut: tuple[int, int] | None = None
    """Start and end of the slice along `axis` of a single part."""
    shape: Shape | None = None
    """Shape of the result, if known."""

    @property
    def plain(self) -> bool:
        """Whether the source tensor is used unchanged."""
        return len(self.parts) == 1 and not self.permute and self.cut is None

    def result(self, shapes: Sequence[Shape]) -> Shape | None:
        """Return the shape of the result for parts of these shapes; None if they do not fit together."""
        found = [self._part_result(shape) for shape in shapes]
        if any(shape is None for shape in found):
            return None
        first, *others = [shape for shape in found if shape is not None]
        if not others:
            return first
        if self.axis >= len(first) or any(_without(o, self.axis) != _without(first, self.axis) for o in others):
            return None
        joined = sum(shape[self.axis] for shape in (first, *others))
        return (*first[: self.axis], joined, *first[self.axis + 1 :])

    def _part_result(self, shape: Shape) -> Shape | None:
        if self.cut is not None:
            if self.axis >= len(shape) or self.cut[1] > shape[self.axis]:
                return None
            shape = (*shape[: self.axis], self.cut[1] - self.cut[0], *shape[self.axis + 1 :])
        if not self.permute:
            return shape
        return tuple(shape[axis] for axis in self.permute) if len(self.permute) == len(shape) else None

    def moves(self, shape: Shape) -> bool:
        """Whether the order of the elements changes; if not, digest and sketch remain valid."""
        if self.cut is not None or len(self.parts) > 1:
            return True
        if not self.permute or not prod(shape):
            return False
        order = [axis for axis in self.permute if shape[axis] != 1]
        return order != sorted(order)

    def apply(self, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return the converted tensor in C order."""
        found = []
        for array in arrays:
            if self.cut is not None:
                array = array[(slice(None),) * self.axis + (slice(*self.cut),)]
            found.append(array.transpose(self.permute) if self.permute else array)
        whole = found[0] if len(found) == 1 else np.concatenate(found, axis=self.axis)
        if self.shape is not None and whole.shape != self.shape:
            whole = whole.reshape(self.shape)
        return np.ascontiguousarray(whole).reshape(whole.shape)  # keeps a scalar 0-dimensional

    def words(self) -> str:
        """Describe the conversion in a few words; empty if nothing changes."""
        words = []
        if len(self.parts) > 1:
            words.append(f"joined ({len(self.parts)} along axis {self.axis})")
        if self.cut is not None:
            words.append(f"split ({self.cut[0]} to {self.cut[1]} of axis {self.axis})")
        if self.permute == (1, 0):
            words.append("transposed")
        elif self.permute:
            words.append("axes " + ",".join(map(str, self.permute)))
        return ", ".join(words)


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])
