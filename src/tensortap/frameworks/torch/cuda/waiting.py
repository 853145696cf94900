"""Tensors that wait until they are read together with others."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from tensortap.frameworks.tensor_kind import TensorKind

__all__ = ["WaitingTensor", "WaitingTensors"]


@dataclass(slots=True, eq=False)
class WaitingTensor:
    """A tensor that is read together with others."""

    tensor: torch.Tensor
    """An alias of its memory. The tensor itself would keep its graph alive, and cause copies of gradients."""
    kind: TensorKind
    address: int
    version: int
    came: int
    """Number of tensors that the lane had seen, this one included."""
    last: int
    """Number of tensors that the lane has seen when this one must be read."""
    due: int
    """The same in bytes."""
    bound: Any
    """The `DeferralBound` of a deferred tensor, or the `DeferralTrial` of one that is read again."""
    base: int
    """The row of the whole that its first row is."""

    def is_due(self, came: int, seen: int) -> bool:
        return self.last <= came or self.due <= seen

    def unchanged(self) -> bool:
        tensor = self.tensor
        return bool(tensor._version == self.version and tensor.data_ptr() == self.address)


class WaitingTensors:
    """The deferred tensors of a lane, by the number of their results, and its counts of tensors and of their bytes.

    `native/waiting.h` is the same in C.
    """

    def __init__(self, most: int) -> None:
        self.came = 0
        """Number of tensors so far."""
        self.seen = 0
        """Bytes of all tensors so far."""
        self.most = most
        """Bytes that may come after a tensor before it must be read."""
        self.last, self.due = 0, 0
        """Number of tensors and of bytes before which no tensor must be read."""
        self._tensors: dict[int, WaitingTensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, number: int) -> bool:
        return number in self._tensors

    def add(self, number: int, waiting: WaitingTensor) -> None:
        self._tensors[number] = waiting

    def bounds(self) -> tuple[int, int]:
        """Return the number of tensors and of bytes that the lane has seen when the first of them must be read."""
        waiting = self._tensors.values()
        last, due = [one.last for one in waiting], [one.due for one in waiting]
        return min(last, default=sys.maxsize), min(due, default=sys.maxsize)

    def numbers(self) -> list[int]:
        return list(self._tensors)

    def take_all(self) -> list[tuple[int, WaitingTensor]]:
        """Remove and return all of them, with their numbers."""
        tensors, self._tensors = self._tensors, {}
        return list(tensors.items())

    def clear(self) -> None:
        self._tensors.clear()
