"""Variants of the kernels, each compiled on first use for one dtype and layout, in under a second."""

from __future__ import annotations

import threading
from importlib import resources
from typing import NamedTuple

from tensortap.kernels.cuda.driver import Kernel, compile_kernel

__all__ = ["BLOCKS_EACH", "FILES", "FINISH", "FINISHERS", "MOST_FINISHED", "Device", "Variant", "compiled", "options"]

BLOCKS_EACH = 2
"""Blocks that run on one processor at a time."""
FINISHERS = 5
"""Blocks that add up the partial results of one tensor: four of them a quarter of its sketch each."""
MOST_FINISHED = 240
"""Maximum number of tensors in one launch of `finish`, whose parameter may have 4 KB."""

_THREADS = 256
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
_PARTS = {False: (4, 32 << 10), True: (8, 64 << 10)}
"""Rows of 16-bit floats that are copied together, and bytes of shared memory for them. With many bytes in flight, some
processors run far ahead of others; in a large tensor that evens out, and fewer waits matter more."""

FILES = {
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
"""Source files of each kernel, in order."""


class Device(NamedTuple):
    """Properties of a GPU that the kernels depend on."""

    number: int
    capability: tuple[int, int]
    processors: int
    toolkit: str
    """The CUDA version of the framework."""


class Variant(NamedTuple):
    """The configuration that a kernel is compiled for."""

    dtype: str
    """A dtype, or "finish" for the kernel that adds up partial results."""
    layout: int = 0
    large: bool = False
    most: int = 1
    """Maximum number of tensors in a launch."""
    placed: bool = False
    """Whether a contiguous tensor begins at another row of a whole."""

    @property
    def name(self) -> str:
        """Return the kernel's name in its source."""
        return "finish" if self == FINISH else "summarize"


FINISH = Variant("finish")

_kernels: dict[tuple[Device, Variant], Kernel] = {}
_compiling = threading.Lock()


def compiled(device: Device, variant: Variant) -> Kernel:
    """Return a kernel; compile it once in a process."""
    with _compiling:
        if (kernel := _kernels.get((device, variant))) is None:
            kernel = _kernels[device, variant] = _compiled(device, variant)
        return kernel


def _compiled(device: Device, variant: Variant) -> Kernel:
    given = options(variant)
    flags = [f"-D{option}={value}" for option, value in given.items()]
    image = compile_kernel(_source(variant.name), variant.name, device.capability, flags, device.toolkit)
    pending = variant.dtype in ("bfloat16", "float16") and variant.layout == 0 and device.capability >= (9, 0)
    return Kernel(image, variant.name, _THREADS, given["RING"] if pending else 0)


def options(variant: Variant) -> dict[str, int]:
    """Return the macros that the source is compiled with."""
    if variant == FINISH:
        return {"THREADS": _THREADS, "MOST": MOST_FINISHED, "BLOCKS": FINISHERS}
    rows, ring = _PARTS[variant.large]
    return {
        "ELEMENT": _ELEMENTS[variant.dtype],
        "THREADS": _THREADS,
        "LAYOUT": variant.layout,
        "PLACED": int(variant.placed),
        "MOST": variant.most,
        "BLOCKS_EACH": BLOCKS_EACH,
        "PART": rows,
        "RING": ring,
    }


def _source(name: str) -> str:
    folder = resources.files("tensortap.kernels") / "cuda"
    return "".join((folder / file).read_text() for file in FILES[name])
