"""Summaries of tensors in a GPU's memory: one read each, nothing allocated, nobody waits.

A framework lends pointers, a stream and memory: the table of digest weights, room for partial results, room for
results, and two numbers for `Turns`. `Gpu.plan` is made once for tensors of one kind; `Plan.read` launches the one read
and leaves partial results. `Together.read` does the same for a few tensors in one launch, which is faster, since a
launch begins and ends slowly. `Gpu.finish` adds up the partial results of many tensors; `columns` reads the results
once they are in host memory.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.kernels.cuda.driver import Kernel, Parameter, clear, compile_kernel
from tensortap.kernels.reference import BUCKETS, ROW

__all__ = [
    "FLAT",
    "MOST_FINISHED",
    "MOST_TOGETHER",
    "PARTIAL_BYTES",
    "RESULT",
    "Device",
    "Gpu",
    "Layout",
    "Plan",
    "Share",
    "Together",
    "Turns",
    "columns",
    "lay_out",
]

RESULT = np.dtype(
    [
        ("sketch", "<f4", BUCKETS),
        ("about", "<f8"),
        ("sum", "<f8"),
        ("squares", "<f8"),
        ("l1", "<f8"),
        ("low", "<f8"),
        ("high", "<f8"),
        ("digest", "<u8"),
        ("nan", "<u8"),
        ("posinf", "<u8"),
        ("neginf", "<u8"),
        ("zeros", "<u8"),
        ("probe", "<u4"),
        ("unchanged", "<u4"),
    ]
)
"""What `finish` leaves of a tensor; sums are of x - about."""

Share = tuple[int, int, int]
"""Pieces, each of which leaves a partial result, batches of rows for each half of a piece, and how many halves have one
more."""

PARTIAL_BYTES = 1552
MOST_FINISHED = 64
"""Tensors that one launch of `finish` takes."""
MOST_TOGETHER = 32
"""Tensors that one launch reads at most."""

_ELEMENTS = {
    "bfloat16": 0,
    "float16": 1,
    "float32": 2,
    "float64": 3,
    "float8_e4m3fn": 4,
    "float8_e5m2": 5,
    "int8": 6,
    "int16": 7,
    "int32": 8,
    "int64": 9,
    "uint8": 10,
    "bool": 10,
    "uint16": 11,
    "uint32": 12,
    "uint64": 13,
}
_THREADS = 256
_BLOCKS_EACH = 2
_FINISHERS = 5
"""Blocks that add up what was found of one tensor."""
_BATCH = 8
"""Rows that half a block takes together."""
_PIECE = 16
"""Batches in a piece of a tensor that is neither small nor great. To add up what was found in a piece takes time, but
so does it to wait, at the end of a launch, for whoever took a piece last."""
_MOST_PIECES = 800
_GREAT = 1 << 26
"""From so many elements on a tensor is read in larger parts, as those are that are read together."""
_PARTS = {False: (4, 32 << 10), True: (8, 64 << 10)}
"""Rows of 16-bit floats that arrive together, and the shared memory they arrive in. With much in flight some processors
run far ahead of others; in a great tensor that evens out, and fewer waits count more."""
_MOST_DIMS = 6
_MOST_SIZES = 4096
_WORKS = struct.Struct("<QII2Q")
_TURNS_OFFSET = 16
_WORK = "5Q4I"
_WORK_BYTES = struct.calcsize(f"<{_WORK}")
_WORK_LISTS = ["<" + count * _WORK for count in range(MOST_TOGETHER + 1)]
_ADDRESSES = struct.Struct("<6Q")
_LAYOUT = struct.Struct(f"<II{_MOST_DIMS}I{_MOST_DIMS}q")
_FILES = {
    "finish": ("common.cuh", "finish.cu"),
    "summarize": (
        "common.cuh",
        "kinds.cuh",
        "instructions.cuh",
        "elements.cuh",
        "tensor.cuh",
        "slow.cuh",
        "fast.cuh",
        "ring.cuh",
        "packed.cuh",
        "summarize.cu",
    ),
}
"""What the kernels are made of."""


class _Variant(NamedTuple):
    """What a kernel was compiled for."""

    dtype: str
    """Or "finish", of which there is one."""
    layout: int = 0
    great: bool = False
    most: int = 1
    """Tensors in a launch."""


_FINISH = _Variant("finish")
_PROBE_OFFSET = RESULT.fields["probe"][1] if RESULT.fields else 0


class Device(NamedTuple):
    """What must be known of a GPU."""

    number: int
    capability: tuple[int, int]
    processors: int
    toolkit: str
    """The CUDA version of the framework."""


class Layout(NamedTuple):
    """How elements in C order are found in memory: 0 as they lie, 1 whole groups of eight at strides, 2 one by one."""

    code: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Innermost first, in elements."""


FLAT = Layout(0, (), ())
"""As they lie."""


def lay_out(shape: Sequence[int], strides: Sequence[int], itemsize: int, address: int) -> Layout | None:
    """The simplest layout that fits, None if the tensor must be copied first.

    >>> lay_out((4, 8), (8, 1), 2, 256)
    Layout(code=0, sizes=(), strides=())
    >>> lay_out((2, 4, 8), (8, 16, 1), 2, 256)
    Layout(code=1, sizes=(1, 4, 2), strides=(8, 16, 8))
    """
    sizes, steps = _collapse(shape, strides)
    if len(sizes) > _MOST_DIMS or max(sizes, default=0) >= 1 << 32:
        contiguous = len(sizes) == 1 and steps[0] == 1 and address % min(16, 8 * itemsize) == 0
        return FLAT if contiguous else None
    aligned = address % min(16, 8 * itemsize) == 0
    if not sizes or (len(sizes) == 1 and steps[0] == 1):
        if aligned:
            return FLAT
        return Layout(2, (math.prod(shape),), (1,))
    if aligned and steps[0] == 1 and sizes[0] % 8 == 0 and all(step % 8 == 0 for step in steps[1:]):
        return Layout(1, (sizes[0] // 8, *sizes[1:]), (8, *steps[1:]))
    return Layout(2, tuple(sizes), tuple(steps))


def _collapse(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Innermost first; neighbours that lie as one become one, and what has one element only is left out."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if sizes and step == steps[-1] * sizes[-1]:
            sizes[-1] *= size
        else:
            sizes.append(size)
            steps.append(step)
    return sizes, steps


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
        padding = (0,) * (_MOST_DIMS - dims)
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
    pieces = max(1, min(_MOST_PIECES, max(min(most_blocks // _BLOCKS_EACH, batches // 4), batches // _PIECE)))
    return pieces if pieces < others else pieces // others * others


def _shared_out(elements: int, pieces: int) -> Share:
    return (pieces, *divmod(elements // (_BATCH * ROW), 2 * pieces))


class Gpu:
    """The kernels of one device. Each is compiled when it is first needed, in under a second."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._most_blocks = device.processors * _BLOCKS_EACH
        self._kernels: dict[_Variant, Kernel] = {}
        self._batch = Parameter(16 + 16 * MOST_FINISHED)

    def plan(self, dtype: str, elements: int, layout: Layout, *, weights: int, turns: Turns, stream: int) -> Plan:
        """For tensors of that kind."""
        kernel = self._kernel(_Variant(dtype, layout.code, elements >= _GREAT and self._roomy))
        return Plan(kernel, elements, layout, self._most_blocks, weights=weights, turns=turns, stream=stream)

    def together(self, dtype: str, *, weights: int, turns: Turns, stream: int) -> Together:
        """For some tensors at a time, each as it lies in memory."""
        kernel = self._kernel(_Variant(dtype, great=self._roomy, most=MOST_TOGETHER))
        return Together(kernel, self._most_blocks, weights=weights, turns=turns, stream=stream)

    def finish(self, pending: Sequence[int], partials: int, results: int, stream: int) -> None:
        """Add up partial results. Of each tensor: the number of the first, how many there are, the slot of its result,
        and a zero; at most `MOST_FINISHED` tensors at a time."""
        struct.pack_into("<QQ", self._batch.memory, 0, partials, results)
        struct.pack_into(f"<{len(pending)}I", self._batch.memory, 16, *pending)
        self._kernel(_FINISH).launch(len(pending) // 4 * _FINISHERS, self._batch, stream)

    @property
    def _roomy(self) -> bool:
        """Whether processors have shared memory for larger parts; some later ones have less."""
        return self._device.capability < (12, 0)

    def _kernel(self, variant: _Variant) -> Kernel:
        if (kernel := self._kernels.get(variant)) is None:
            kernel = self._kernels[variant] = _kernel(self._device, variant)
        return kernel


_compiled: dict[tuple[Device, _Variant], Kernel] = {}
_compiling = threading.Lock()


def _kernel(device: Device, variant: _Variant) -> Kernel:
    """Compiled once in a process."""
    with _compiling:
        if (kernel := _compiled.get((device, variant))) is None:
            kernel = _compiled[device, variant] = _finish(device) if variant == _FINISH else _summarize(device, variant)
        return kernel


def _finish(device: Device) -> Kernel:
    return Kernel(
        compile_kernel(_source("finish"), "finish", device.capability, (), device.toolkit), "finish", _THREADS
    )


def _summarize(device: Device, variant: _Variant) -> Kernel:
    options = _options(variant)
    flags = [f"-D{option}={value}" for option, value in options.items()]
    image = compile_kernel(_source("summarize"), "summarize", device.capability, flags, device.toolkit)
    arriving = variant.dtype in ("bfloat16", "float16") and variant.layout == 0 and device.capability >= (9, 0)
    return Kernel(image, "summarize", _THREADS, options["RING"] if arriving else 0)


def _options(variant: _Variant) -> dict[str, int]:
    """What the source wants to know."""
    rows, ring = _PARTS[variant.great]
    return {
        "ELEMENT": _ELEMENTS[variant.dtype],
        "LAYOUT": variant.layout,
        "MOST": variant.most,
        "BLOCKS_EACH": _BLOCKS_EACH,
        "PART": rows,
        "RING": ring,
    }


def _source(name: str) -> str:
    folder = resources.files("tensortap.kernels") / "cuda"
    return "".join((folder / file).read_text() for file in _FILES[name])


def columns(results: npt.NDArray[Any], elements: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
    """The fields of summaries, by name, from what `finish` left in host memory."""
    finite = elements - (results["nan"] + results["posinf"] + results["neginf"]).astype(np.int64)
    low, high = results["low"].copy(), results["high"].copy()
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        along = results["sum"] / finite
        mean = results["about"] + along
        m2 = np.maximum(results["squares"] - results["sum"] * along, 0.0)
        constant = low == high
        mean[constant], m2[constant] = low[constant], 0.0
        std = np.sqrt(m2 / finite)
        l2 = np.sqrt(m2 + finite * np.square(mean))
    empty = finite == 0
    low[empty] = high[empty] = mean[empty] = std[empty] = math.nan
    l2[empty] = 0.0
    counts = {name: results[name].astype(np.int64) for name in ("nan", "posinf", "neginf", "zeros")}
    moments = {"min": low, "max": high, "mean": mean, "std": std, "l1": results["l1"], "l2": l2}
    return {"elements": elements, **counts, **moments, "digest": results["digest"], "sketch": results["sketch"]}
