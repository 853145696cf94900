"""Summaries of tensors in a GPU's memory: one read of each tensor, without allocations or synchronisation.

The framework provides pointers, a stream and memory: the table of digest weights, buffers for partial results and for
results, and two integers for `PieceCounters`. `Gpu.plan` makes a plan for all tensors of one kind; `ReadPlan.read`
launches the read and leaves partial results. `BatchRead.read` reads several tensors in one launch, which is faster,
since a launch starts and ends slowly. `Gpu.finish` adds up the partial results of many tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from tensortap.kernels.cuda.driver import Kernel, Parameter, clear
from tensortap.kernels.cuda.layout import MOST_DIMS, Layout
from tensortap.kernels.cuda.parts import Part, Runs
from tensortap.kernels.cuda.results import RESULT
from tensortap.kernels.cuda.variants import BLOCKS_EACH, FINISH, FINISHERS, MOST_FINISHED, Device, Variant, compiled
from tensortap.kernels.summary.reference import ROW

__all__ = [
    "MOST_TOGETHER",
    "PARTIAL_BYTES",
    "PENDING",
    "PROBE_OFFSET",
    "BatchRead",
    "Gpu",
    "PartPlan",
    "PieceCounters",
    "ReadPlan",
    "Share",
]

Share = tuple[int, int, int]
"""The division of a tensor: number of pieces, each with a partial result; batches of rows of each half of a piece;
number of halves with one more."""

PARTIAL_BYTES = 1680
MOST_TOGETHER = 60
"""Maximum number of tensors in one launch, whose parameter may have 4 KB."""

_BATCH = 8
"""Rows that half a block reads together."""
_PIECE = 16
"""Batches in a piece of a tensor of medium size. Each piece costs time to add up its result; larger pieces cost time at
the end of a launch, waiting for the last one."""
_MOST_PIECES = 800
_MOST_IN_PARTS = 8192
"""Maximum number of pieces of a part of a whole, over all of its boxes."""
_LARGE = 1 << 26
"""Number of elements from which a tensor is read in larger parts, as tensors of a batch are."""
_MOST_SIZES = 4096
_RUNS = 3
"""Layout of a part of a whole that consists of runs."""
_WORKS = struct.Struct("<QII2Q")
_TURNS_OFFSET = 16
_WORK = "5Q4I"
_WORK_BYTES = struct.calcsize(f"<{_WORK}")
_PLACED_WORK = f"{_WORK}2I"
_WORK_LISTS = {
    placed: ["<" + count * (_PLACED_WORK if placed else _WORK) for count in range(MOST_TOGETHER + 1)]
    for placed in (False, True)
}
_ADDRESSES = struct.Struct("<6Q")
_LAYOUT = struct.Struct(f"<II{MOST_DIMS}I{MOST_DIMS}q")
_PART = struct.Struct(f"<II{MOST_DIMS}I{MOST_DIMS}q{MOST_DIMS}Q4Q")
PENDING = struct.Struct("<4I")
"""A tensor with partial results: the number of the first, their count, the slot of its result, and a zero."""
PROBE_OFFSET = RESULT.fields["probe"][1] if RESULT.fields else 0


class PieceCounters:
    """Two integers on the device with which the blocks of a launch count the pieces that they take.

    Each launch counts in one of them and clears the other for the next launch in the same stream. `native/launches.h`
    uses these attributes.
    """

    __slots__ = ("_address", "_next", "_now", "_stream", "_sure")

    def __init__(self, address: int, stream: int) -> None:
        self._address = address
        self._stream = stream
        self._now, self._next = address, address + 4
        self._sure = False
        """Whether the next counter is known to be zero."""

    def begin(self) -> tuple[int, int]:
        """Return the address of the counter of a launch, and of the one that it clears."""
        if not self._sure:
            clear(self._address, 2, self._stream)
        self._sure = False  # an interrupted launch may have begun
        return self._now, self._next

    def end(self) -> None:
        """Swap the counters after a successful launch."""
        self._now, self._next = self._next, self._now
        self._sure = True


class ReadPlan:
    """The launch for tensors of one kind on one stream, complete except for their addresses."""

    __slots__ = ("_launch", "_memory", "_turns", "pieces")

    def __init__(
        self,
        kernel: Kernel,
        elements: int,
        layout: Layout,
        most_blocks: int,
        *,
        weights: int,
        turns: PieceCounters,
        stream: int,
    ) -> None:
        self.pieces = _pieces(elements, most_blocks)
        """Number of partial results."""
        parameter = Parameter(_WORKS.size + _WORK_BYTES + _LAYOUT.size)
        _WORKS.pack_into(parameter.memory, 0, weights, 1, self.pieces, 0, 0)
        work = 0, 0, 0, 0, elements, *_shared_out(elements, self.pieces), 0
        struct.pack_into(f"<{_WORK}", parameter.memory, _WORKS.size, *work)
        dims = len(layout.sizes)
        padding = (0,) * (MOST_DIMS - dims)
        sizes = *layout.sizes, *padding, *layout.strides, *padding
        _LAYOUT.pack_into(parameter.memory, _WORKS.size + _WORK_BYTES, dims, 0, *sizes)
        self._turns = turns
        self._memory = parameter.memory
        self._launch = kernel.prepared(min(self.pieces + 1, most_blocks), parameter, stream)

    def read(self, address: int, partials: int, result: int, known: int = 0) -> None:
        """Read a tensor once, given the addresses of the tensor, of a buffer for partial results, and of one result.

        With `known`, the address of an earlier result, nothing is read if the probed elements have not changed.
        """
        probe, expected = result + PROBE_OFFSET, known + PROBE_OFFSET if known else 0
        turns = self._turns
        _ADDRESSES.pack_into(self._memory, _TURNS_OFFSET, *turns.begin(), address, partials, probe, expected)
        self._launch()
        turns.end()


class PartPlan:
    """The launches for local tensors of one kind that are parts of a whole: one for each box."""

    __slots__ = ("_reads", "pieces")

    def __init__(
        self,
        kernel: Kernel,
        part: Part,
        most_blocks: int,
        *,
        weights: int,
        turns: PieceCounters,
        stream: int,
    ) -> None:
        self._reads: list[tuple[Callable[[], None], Any, PieceCounters, int]] = []
        self.pieces = 0
        for box in part.boxes or (None,):
            elements = part.elements if box is None else box.rows * ROW
            pieces = min(_pieces(elements, most_blocks), _MOST_IN_PARTS // max(1, len(part.boxes)))
            parameter = Parameter(_WORKS.size + _WORK_BYTES + _PART.size)
            _WORKS.pack_into(parameter.memory, 0, weights, 1, pieces, 0, 0)
            work = 0, 0, 0, 0, elements, *_shared_out(elements, pieces), 0
            struct.pack_into(f"<{_WORK}", parameter.memory, _WORKS.size, *work)
            after = _WORKS.size + _WORK_BYTES
            if box is None:
                struct.pack_into("<II", parameter.memory, after, part.base, 0)
            else:
                _PART.pack_into(parameter.memory, after, *_runs_as_struct(box), part.stored)
            launch = kernel.prepared(min(pieces + 1, most_blocks), parameter, stream)
            self._reads.append((launch, parameter.memory, turns, self.pieces * PARTIAL_BYTES))
            self.pieces += pieces

    def read(self, address: int, partials: int, result: int, known: int = 0) -> None:
        """Read a tensor once, like `ReadPlan.read`. All launches probe the same elements of it."""
        probe, expected = result + PROBE_OFFSET, known + PROBE_OFFSET if known else 0
        for launch, memory, turns, before in self._reads:
            where = address, partials + before, probe, expected
            _ADDRESSES.pack_into(memory, _TURNS_OFFSET, *turns.begin(), *where)
            launch()
            turns.end()


def _runs_as_struct(box: Runs) -> tuple[int, ...]:
    padding = (0,) * (MOST_DIMS - len(box.sizes))
    columns = [number for column in (box.sizes, box.strides, box.steps) for number in (*column, *padding)]
    return len(box.sizes), box.rows_each, *columns, box.offset, box.position, box.length


class BatchRead:
    """The launch that reads several contiguous tensors of one dtype at once, on one stream.

    If they are `placed`, each may begin at another row of a whole than the first. `native/launches.h` fills in the same
    parameter.
    """

    __slots__ = ("_launch", "_memory", "_most_blocks", "_placed", "_shares", "_turns", "_weights")

    def __init__(
        self, kernel: Kernel, most_blocks: int, placed: bool, *, weights: int, turns: PieceCounters, stream: int
    ) -> None:
        self._most_blocks = most_blocks
        self._placed = placed
        self._weights = weights
        self._turns = turns
        self._shares: dict[int, Share] = {}
        parameter = Parameter(_WORKS.size + struct.calcsize(_WORK_LISTS[placed][MOST_TOGETHER]))
        self._memory = parameter.memory
        self._launch = kernel.prepared(most_blocks, parameter, stream)

    def read(self, tensors: Sequence[tuple[int, int, Share, int, int, int]]) -> None:
        """Read up to `MOST_TOGETHER` tensors.

        Each has its address, its number of elements, its division, the addresses of a buffer for partial results and
        of one result, and the number of its first row in the whole.
        """
        works: list[int] = []
        first = 0
        for address, elements, share, partials, result, base in tensors:
            works += (address, partials, result + PROBE_OFFSET, 0, elements, *share, first)
            if self._placed:
                works += (base, 0)
            first += share[0]
        turns = self._turns
        _WORKS.pack_into(self._memory, 0, self._weights, len(tensors), first, *turns.begin())
        struct.pack_into(_WORK_LISTS[self._placed][len(tensors)], self._memory, _WORKS.size, *works)
        self._launch()
        turns.end()

    def shared_out(self, elements: int) -> Share:
        if (share := self._shares.get(elements)) is None:
            if len(self._shares) == _MOST_SIZES:  # bounds memory if sizes keep changing
                self._shares.clear()
            share = self._shares[elements] = _shared_out(elements, _pieces(elements, self._most_blocks))
        return share


def _pieces(elements: int, most_blocks: int) -> int:
    """Return the number of pieces of a tensor. It decides the last bits of sums, so it must not depend on the launch.

    A small tensor has a piece for each processor, as long as each half of a piece has two batches. A tensor with more
    pieces than blocks has equally many for each block, except the block that checks the probe first.
    """
    batches, others = elements // (_BATCH * ROW), most_blocks - 1
    pieces = max(1, min(_MOST_PIECES, max(min(most_blocks // BLOCKS_EACH, batches // 4), batches // _PIECE)))
    return pieces if pieces < others else pieces // others * others


def _shared_out(elements: int, pieces: int) -> Share:
    return (pieces, *divmod(elements // (_BATCH * ROW), 2 * pieces))


class Gpu:
    """The kernels of one device. Each is compiled on first use, in under a second."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._most_blocks = device.processors * BLOCKS_EACH
        self._kernels: dict[Variant, Kernel] = {}
        self._batch = Parameter(16 + PENDING.size * MOST_FINISHED)

    def plan(
        self, dtype: str, elements: int, layout: Layout, *, weights: int, turns: PieceCounters, stream: int
    ) -> ReadPlan:
        """Return the plan for tensors of this dtype, size and layout."""
        kernel = self._kernel(Variant(dtype, layout.code, elements >= _LARGE and self._has_large_shared_memory))
        return ReadPlan(kernel, elements, layout, self._most_blocks, weights=weights, turns=turns, stream=stream)

    def plan_part(self, dtype: str, part: Part, *, weights: int, turns: PieceCounters, stream: int) -> PartPlan:
        """Return the plan for tensors of this dtype that are such a part of a whole."""
        large = part.elements >= _LARGE and self._has_large_shared_memory
        variant = Variant(dtype, 0, large, placed=True) if part.base >= 0 else Variant(dtype, _RUNS)
        return PartPlan(self._kernel(variant), part, self._most_blocks, weights=weights, turns=turns, stream=stream)

    def together(
        self, dtype: str, placed: bool = False, *, weights: int, turns: PieceCounters, stream: int
    ) -> BatchRead:
        """Return the launch for batches of contiguous tensors; `placed` ones need not begin at the first row."""
        variant = Variant(dtype, large=self._has_large_shared_memory, most=MOST_TOGETHER, placed=placed)
        return BatchRead(self._kernel(variant), self._most_blocks, placed, weights=weights, turns=turns, stream=stream)

    def finish(self, pending: bytearray, partials: int, results: int, stream: int) -> None:
        """Add up the partial results of up to `MOST_FINISHED` tensors, each a `PENDING` struct."""
        struct.pack_into(f"<QQ{len(pending)}s", self._batch.memory, 0, partials, results, pending)
        self._kernel(FINISH).launch(len(pending) // PENDING.size * FINISHERS, self._batch, stream)

    @property
    def _has_large_shared_memory(self) -> bool:
        """Whether processors have shared memory for larger parts; some newer ones have less."""
        return self._device.capability < (12, 0)

    def _kernel(self, variant: Variant) -> Kernel:
        if (kernel := self._kernels.get(variant)) is None:
            kernel = self._kernels[variant] = compiled(self._device, variant)
        return kernel
