"""CUDA tensors that were seen and are looked at a little later, many at a time.

To look at a tensor takes many calls. One tensor after the other, they take far less time than between those of a model,
whose code drives ours out of the processor's caches; and what holds the host up in a forward holds the device up, too.
Besides, tensors that come together are read together.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tensortap.frameworks.device_reader import DeferralBound
from tensortap.frameworks.torch.cuda.lane import TOO_LARGE, Lane
from tensortap.frameworks.torch.tensors import NAMES, lies_flat
from tensortap.kernels.cuda.gpu import MOST_TOGETHER

__all__ = ["DeferredReads", "Seen"]

Look = Callable[[Any], None]
Seen = tuple[torch.Tensor, int, int, DeferralBound, Look]
"""Another name for a tensor's memory (the tensor itself would keep its graph alive, and have gradients copied), its
version and its address when it was seen, how long it may wait, and who looks at it."""


class DeferredReads:
    """Of one stream, in the order in which they came."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._seen: deque[Seen] = deque()
        self._bytes = 0
        self._most = sys.maxsize
        """With so many, one has waited as long as it may."""
        self.is_due = False
        """Whether all should be looked at now."""

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, tensor: torch.Tensor, bound: DeferralBound, look: Look) -> bool:
        """Whether it was taken: not, if it is anything peculiar, must be copied before it can be read, or is so large
        that it had better be read alone."""
        # Between the calls of a model: as little as will do.
        try:
            if not lies_flat(tensor) or tensor.dtype not in NAMES or tensor.is_nested:
                return False
            version, address, nbytes = tensor._version, tensor.data_ptr(), tensor.nbytes
        except RuntimeError:  # it has no version, or no memory of its own
            return False
        if not address or nbytes >= TOO_LARGE:
            return False
        count = len(self._seen) + 1
        self._most = min(self._most, count + bound.safe_delay)
        self._bytes += nbytes
        self._seen.append((tensor.detach(), version, address, bound, look))
        # None waits longer than its place has been tried: what did not change then will not change now.
        self.is_due = count >= self._most or count == MOST_TOGETHER or self.lane.is_due(count, self._bytes)
        return True

    def hurry(self) -> None:
        """Whoever is left is looked at when the next one comes."""
        if self._seen:
            self._most = 0

    def pop(self) -> Seen:
        """The one that came first, which is somebody else's from now on."""
        first = self._seen.popleft()
        if not self._seen:
            self._bytes, self._most, self.is_due = 0, sys.maxsize, False
        return first
