"""Summaries of tensors in a GPU's memory: one read each, nothing allocated, nobody waits.

A framework lends pointers, a stream and memory: the table of digest weights, room for partial results, room for
results, and two numbers for `Turns`. `Gpu.plan` is made once for tensors of one kind; `Plan.read` launches the one read
and leaves partial results. `Together.read` does the same for a few tensors in one launch, which is faster, since a
launch begins and ends slowly. `Gpu.finish` adds up the partial results of many tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tensortap.kernels.cuda.driver import Kernel, Parameter, clear
from tensortap.kernels.cuda.layout import MOST_DIMS, Layout
from tensortap.kernels.cuda.results import RESULT
from tensortap.kernels.cuda.variants import BLOCKS_EACH, FINISH, FINISHERS, MOST_FINISHED, Device, Variant, compiled
from tensortap.kernels.summary.reference import ROW

__all__ = ["MOST_TOGETHER", "PARTIAL_BYTES", "Gpu", "Plan", "Share", "Together", "Turns"]

Share = tuple[int, int, int]
"""Pieces, each of which leaves a partial result, batches of rows for each half of a piece, and how many halves have one
more."""

PARTIAL_BYTES = 1552
MOST_TOGETHER = 32
"""Tensors that one launch reads at most."""

_BATCH = 8
"""Rows that half a block takes together."""
_PIECE = 16
"""Batches in a piece of a tensor that is neither small nor great. To add up what was found in a piece takes time, but
so does it to wait, at the end of a launch, for whoever took a piece last."""
_MOST_PIECES = 800
_GREAT = 1 << 26
"""From so many elements on a tensor is read in larger parts, as those are that are read together."""
_MOST_SIZES = 4096
_WORKS = struct.Struct("<QII2Q")
_TURNS_OFFSET = 16
_WORK = "5Q4I"
_WORK_BYTES = struct.calcsize(f"<{_WORK}")
_WORK_LISTS = ["<" + count * _WORK for count in range(MOST_TOGETHER + 1)]
_ADDRESSES = struct.Struct("<6Q")
_LAYOUT = struct.Struct(f"<II{MOST_DIMS}I{MOST_DIMS}q")
_PROBE_OFFSET = RESULT.fields["probe"][1] if RESULT.fields else 0


class Turns:
    """Where the blocks of a launch count the pieces they take: two numbers on the device. Each launch counts in one of
    them and clears the other for the next one in the same stream."""

    def __init__(self, address: int, stream: int) -> None:
        self._address = address
        self._stream = stream
        self._now, self._next = address, address + 4
        self._sure = False
        """Whether the first of them is known to be zero."""

    def begin(self) -> tuple[int, int]:
        """Before a launch: where it counts, and what it clears."""
        if not self._sure:
            clear(self._address, 2, self._stream)
        self._sure = False  # nobody knows whether a launch that was interrupted has begun
        return self._now, self._next

    def end(self) -> None:
        """The launch has succeeded."""
        self._now, self._next = self._next, self._now
        self._sure = True


class Plan:
    """How tensors of one kind are read on one stream: all but their addresses."""

    __slots__ = ("_launch", "_memory", "_turns", "pieces")

    def __init__(
        self,
        kernel: Kernel,
        elements: int,
        layout: Layout,
        most_blocks: int,
        *,
        weights: int,
        turns: Turns,
        stream: int,
    ) -> None:
        self.pieces = _pieces(elements, most_blocks)
        """So many partial results there will be."""
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
        """Read a tensor once. Addresses are of the tensor, of room for partial results, and of one result.

        With `known`, the address of an earlier result, nothing is read if a few elements are still what they were then.
        """
        probe, expected = result + _PROBE_OFFSET, known + _PROBE_OFFSET if known else 0
        turns = self._turns
        _ADDRESSES.pack_into(self._memory, _TURNS_OFFSET, *turns.begin(), address, partials, probe, expected)
        self._launch()
        turns.end()


class Together:
    """Reads tensors of one dtype, as they lie in memory, on one stream: all of them in one launch."""

    def __init__(self, kernel: Kernel, most_blocks: int, *, weights: int, turns: Turns, stream: int) -> None:
        self._most_blocks = most_blocks
        self._weights = weights
        self._turns = turns
        self._shares: dict[int, Share] = {}
        parameter = Parameter(_WORKS.size + MOST_TOGETHER * _WORK_BYTES)
        self._memory = parameter.memory
        self._launch = kernel.prepared(most_blocks, parameter, stream)

    def read(self, tensors: Sequence[tuple[int, int, Share, int, int]]) -> None:
        """Of each tensor the address, the number of its elements, how these are shared out, and the addresses of room
        for partial results and of one result; at most `MOST_TOGETHER`."""
        works: list[int] = []
        first = 0
        for address, elements, share, partials, result in tensors:
            works += (address, partials, result + _PROBE_OFFSET, 0, elements, *share, first)
            first += share[0]
        turns = self._turns
        _WORKS.pack_into(self._memory, 0, self._weights, len(tensors), first, *turns.begin())
        struct.pack_into(_WORK_LISTS[len(tensors)], self._memory, _WORKS.size, *works)
        self._launch()
        turns.end()

    def shared_out(self, elements: int) -> Share:
        if (share := self._shares.get(elements)) is None:
            if len(self._shares) == _MOST_SIZES:  # tensors of ever new sizes
                self._shares.clear()
            share = self._shares[elements] = _shared_out(elements, _pieces(elements, self._most_blocks))
        return share


def _pieces(elements: int, most_blocks: int) -> int:
    """Into so many a tensor is divided, whichever way it is read: that decides the last bits of its sums.

    A small one still has a piece for each processor, as long as each half of it has two batches. One that is read alone
    and has more pieces than there are blocks has as many for each block, but the one that looks at the probe first.
    """
    batches, others = elements // (_BATCH * ROW), most_blocks - 1
    pieces = max(1, min(_MOST_PIECES, max(min(most_blocks // BLOCKS_EACH, batches // 4), batches // _PIECE)))
    return pieces if pieces < others else pieces // others * others


def _shared_out(elements: int, pieces: int) -> Share:
    return (pieces, *divmod(elements // (_BATCH * ROW), 2 * pieces))


class Gpu:
    """The kernels of one device. Each is compiled when it is first needed, in under a second."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._most_blocks = device.processors * BLOCKS_EACH
        self._kernels: dict[Variant, Kernel] = {}
        self._batch = Parameter(16 + 16 * MOST_FINISHED)

    def plan(self, dtype: str, elements: int, layout: Layout, *, weights: int, turns: Turns, stream: int) -> Plan:
        """For tensors of that kind."""
        kernel = self._kernel(Variant(dtype, layout.code, elements >= _GREAT and self._roomy))
        return Plan(kernel, elements, layout, self._most_blocks, weights=weights, turns=turns, stream=stream)

    def together(self, dtype: str, *, weights: int, turns: Turns, stream: int) -> Together:
        """For some tensors at a time, each as it lies in memory."""
        kernel = self._kernel(Variant(dtype, great=self._roomy, most=MOST_TOGETHER))
        return Together(kernel, self._most_blocks, weights=weights, turns=turns, stream=stream)

    def finish(self, pending: Sequence[int], partials: int, results: int, stream: int) -> None:
        """Add up partial results. Of each tensor: the number of the first, how many there are, the slot of its result,
        and a zero; at most `MOST_FINISHED` tensors at a time."""
        struct.pack_into("<QQ", self._batch.memory, 0, partials, results)
        struct.pack_into(f"<{len(pending)}I", self._batch.memory, 16, *pending)
        self._kernel(FINISH).launch(len(pending) // 4 * FINISHERS, self._batch, stream)

    @property
    def _roomy(self) -> bool:
        """Whether processors have shared memory for larger parts; some later ones have less."""
        return self._device.capability < (12, 0)

    def _kernel(self, variant: Variant) -> Kernel:
        if (kernel := self._kernels.get(variant)) is None:
            kernel = self._kernels[variant] = compiled(self._device, variant)
        return kernel
