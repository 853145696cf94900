"""Deferred reads of CUDA tensors, which run many at a time.

A read takes many Python calls. They are far faster one tensor after the other than between the calls of a model, whose
code evicts ours from the processor's caches. A delay of the host in a forward also delays the device. In addition,
tensors that are read together share a launch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tensortap.frameworks.device_reader import DeferralBound, DeferredSlot, SlotPlacement
from tensortap.frameworks.tensor_kind import TensorKind
from tensortap.frameworks.torch.cuda.lane import TOO_LARGE, Lane
from tensortap.frameworks.torch.kinds import KindTable
from tensortap.frameworks.torch.tensors import NAMES, PLAIN
from tensortap.kernels.cuda.gpu import MOST_TOGETHER

__all__ = ["DeferredRead", "DeferredReads"]

DeferredRead = tuple[torch.Tensor, int, int, TensorKind, DeferralBound, Any, int, SlotPlacement | None]
"""An alias of the tensor's memory, its version and address when it was seen, its kind and bound, its slot and step, and
its placement. The tensor itself would keep its graph alive, and cause copies of gradients."""


class DeferredReads:
    """The deferred reads of one stream, in the order in which they came. `native/deferred.h` adds and runs most."""

    __slots__ = ("_bytes", "_most", "_seen", "index", "is_due", "lane", "stream")

    def __init__(self, lane: Lane, index: int, stream: int) -> None:
        """`index` is the number of the device, and `stream` the address of the stream."""
        self.lane = lane
        self.index = index
        self.stream = stream
        self._seen: list[DeferredRead] = []
        self._bytes = 0
        self._most = sys.maxsize
        """Upper bound on the number of reads, given by the one with the shortest delay; reaching it forces a flush."""
        self.is_due = False
        """Whether all reads should run now."""

    def __len__(self) -> int:
        return len(self._seen)

    def add(
        self,
        tensor: torch.Tensor,
        bound: DeferralBound,
        slot: DeferredSlot,
        step: int,
        place: SlotPlacement | None = None,
    ) -> bool:
        """Return whether the read was deferred.

        It is not if the tensor is of a special class, must be copied first, or is large enough for its own launch.
        """
        # This runs between the calls of a model, so it does as little as possible.
        if type(tensor) not in PLAIN:
            return False
        try:
            kind = slot.likely
            if kind is None or tensor.dtype is not kind.dtype or tensor.shape != kind.shape:
                if (kind := _kinds.of(tensor)) is None:
                    return False
                slot.likely = kind
            version, address = tensor._version, tensor.data_ptr()
            if not address or address % 16 or not tensor.is_contiguous() or tensor.is_neg():
                return False
        except RuntimeError:  # it has no version, no shape, or no own memory
            return False
        nbytes = kind.nbytes
        if nbytes >= TOO_LARGE:
            return False
        count = len(self._seen) + 1
        if (most := count + bound.safe_delay) < self._most:
            self._most = most
        self._bytes += nbytes
        self._seen.append((tensor.detach(), version, address, kind, bound, slot, step, place))
        # No read waits longer than in its trial, during which the tensor did not change.
        self.is_due = count >= self._most or count == MOST_TOGETHER or self.lane.is_due(count, self._bytes)
        return True

    def flush_with_next(self) -> None:
        """Make the remaining reads run when the next one comes."""
        if self._seen:
            self._most = 0

    def pop(self) -> DeferredRead:
        """Remove and return the first read."""
        first = self._seen.pop(0)  # there are at most MOST_TOGETHER
        if not self._seen:
            self._bytes, self._most, self.is_due = 0, sys.maxsize, False
        return first


_READABLE = {dtype: 0 for dtype in NAMES if not dtype.is_complex}
_kinds = KindTable(lambda: _READABLE)
