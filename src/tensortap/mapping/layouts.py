"""How one side's tensor is read in the other side's layout: axes in another order, several joined, a part of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Reading", "Shape", "common_shape", "inverse", "same_elements"]

Shape = tuple[int, ...]


def inverse(axes: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes another."""
    return tuple(int(axis) for axis in np.argsort(axes))


def same_elements(left: Shape, right: Shape) -> bool:
    """Whether two shapes differ in axes of size one at most: the elements lie in the same order."""
    return [size for size in left if size != 1] == [size for size in right if size != 1]


def common_shape(left: Shape, right: Shape) -> Shape | None:
    """The shape at which two values are compared that differ in axes of size one alone; None if they differ otherwise.

    >>> common_shape((1, 12), (2, 12)), common_shape((2, 1, 1, 8), (2, 8)), common_shape((2, 12), (12, 2))
    ((2, 12), (2, 1, 1, 8), None)
    """
    if same_elements(left, right):
        return max(left, right, key=len)
    if prod(left) == 1 or prod(right) == 1:  # one number is no value that was repeated
        return None
    longer, shorter = sorted((left, right), key=len, reverse=True)
    shorter = (1,) * (len(longer) - len(shorter)) + shorter
    pairs = list(zip(longer, shorter, strict=True))
    if any(one != other and 1 not in (one, other) for one, other in pairs):
        return None
    return tuple(max(sizes) for sizes in pairs) if prod(left) and prod(right) else None


@dataclass(frozen=True, slots=True)
class Reading:
    """How a tensor is made of the other side's: each part cut, then permuted, then all joined, then shaped."""

    parts: tuple[str, ...]
    """Full names on the other side; several are joined."""
    permute: tuple[int, ...] = ()
    axis: int = 0
    """Along which parts are joined, or one is cut."""
    cut: tuple[int, int] | None = None
    """From where to where along `axis` of the one part."""
    shape: Shape | None = None
    """What comes out, if that is known."""

    @property
    def plain(self) -> bool:
        """Whether it is the other side's tensor, as it is."""
        return len(self.parts) == 1 and not self.permute and self.cut is None

    def result(self, shapes: Sequence[Shape]) -> Shape | None:
        """The shape that comes out of parts of these shapes; None if they do not fit together."""
        found = [self._one(shape) for shape in shapes]
        if any(shape is None for shape in found):
            return None
        first, *others = [shape for shape in found if shape is not None]
        if not others:
            return first
        if self.axis >= len(first) or any(_without(o, self.axis) != _without(first, self.axis) for o in others):
            return None
        joined = sum(shape[self.axis] for shape in (first, *others))
        return (*first[: self.axis], joined, *first[self.axis + 1 :])

    def _one(self, shape: Shape) -> Shape | None:
        if self.cut is not None:
            if self.axis >= len(shape) or self.cut[1] > shape[self.axis]:
                return None
            shape = (*shape[: self.axis], self.cut[1] - self.cut[0], *shape[self.axis + 1 :])
        if not self.permute:
            return shape
        return tuple(shape[axis] for axis in self.permute) if len(self.permute) == len(shape) else None

    def moves(self, shape: Shape) -> bool:
        """Whether elements end up in another order than they lie in; if not, digest and sketch still hold."""
        if self.cut is not None or len(self.parts) > 1:
            return True
        if not self.permute or not prod(shape):
            return False
        order = [axis for axis in self.permute if shape[axis] != 1]
        return order != sorted(order)

    def apply(self, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """The tensor itself, in C order."""
        found = []
        for array in arrays:
            if self.cut is not None:
                array = array[(slice(None),) * self.axis + (slice(*self.cut),)]
            found.append(array.transpose(self.permute) if self.permute else array)
        whole = found[0] if len(found) == 1 else np.concatenate(found, axis=self.axis)
        if self.shape is not None and whole.shape != self.shape:
            whole = whole.reshape(self.shape)
        return np.ascontiguousarray(whole).reshape(whole.shape)  # a scalar stays one

    def words(self) -> str:
        """What is done, in a few words; empty if nothing is."""
        said = []
        if len(self.parts) > 1:
            said.append(f"joined ({len(self.parts)} along axis {self.axis})")
        if self.cut is not None:
            said.append(f"split ({self.cut[0]} to {self.cut[1]} of axis {self.axis})")
        if self.permute == (1, 0):
            said.append("transposed")
        elif self.permute:
            said.append("axes " + ",".join(map(str, self.permute)))
        return ", ".join(said)


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])
