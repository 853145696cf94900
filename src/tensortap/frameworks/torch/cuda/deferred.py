"""Deferred reads of CUDA tensors, which run many at a time.

A read takes many Python calls. They are far faster one tensor after the other than between the calls of a model, whose
code evicts ours from the processor's caches. A delay of the host in a forward also delays the device. In addition,
tensors that are read together share a launch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tensortap.frameworks.device_reader import DeferralBound
from tensortap.frameworks.torch.cuda.lane import TOO_LARGE, Lane
from tensortap.frameworks.torch.tensors import NAMES, is_plain_flat
from tensortap.kernels.cuda.gpu import MOST_TOGETHER

__all__ = ["DeferredRead", "DeferredReads"]

Read = Callable[[Any], None]
DeferredRead = tuple[torch.Tensor, int, int, DeferralBound, Read]
"""An alias of the tensor's memory, its version and address when it was seen, its bound, and the read. The tensor itself
would keep its graph alive, and cause copies of gradients."""


class DeferredReads:
    """The deferred reads of one stream, in the order in which they came."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._seen: deque[DeferredRead] = deque()
        self._bytes = 0
        self._most = sys.maxsize
        """Upper bound on the number of reads, given by the one with the shortest delay; reaching it forces a flush."""
        self.is_due = False
        """Whether all reads should run now."""

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, tensor: torch.Tensor, bound: DeferralBound, read: Read) -> bool:
        """Return whether the read was deferred.

        It is not if the tensor is of a special class, must be copied first, or is large enough for its own launch.
        """
        # This runs between the calls of a model, so it does as little as possible.
        try:
            if not is_plain_flat(tensor) or tensor.dtype not in NAMES or tensor.is_nested:
                return False
            version, address, nbytes = tensor._version, tensor.data_ptr(), tensor.nbytes
        except RuntimeError:  # it has no version, or no own memory
            return False
        if not address or nbytes >= TOO_LARGE:
            return False
        count = len(self._seen) + 1
        self._most = min(self._most, count + bound.safe_delay)
        self._bytes += nbytes
        self._seen.append((tensor.detach(), version, address, bound, read))
        # No read waits longer than in its trial, during which the tensor did not change.
        self.is_due = count >= self._most or count == MOST_TOGETHER or self.lane.is_due(count, self._bytes)
        return True

    def flush_with_next(self) -> None:
        """Make the remaining reads run when the next one comes."""
        if self._seen:
            self._most = 0

    def pop(self) -> DeferredRead:
        """Remove and return the first read."""
        first = self._seen.popleft()
        if not self._seen:
            self._bytes, self._most, self.is_due = 0, sys.maxsize, False
        return first
