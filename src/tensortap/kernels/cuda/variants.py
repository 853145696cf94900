"""The kernels, each compiled for what it is needed for when it is first needed, in under a second."""

from __future__ import annotations

import threading
from importlib import resources
from typing import NamedTuple

from tensortap.kernels.cuda.driver import Kernel, compile_kernel

__all__ = ["BLOCKS_EACH", "FILES", "FINISH", "FINISHERS", "MOST_FINISHED", "Device", "Variant", "compiled", "options"]

BLOCKS_EACH = 2
"""At a time on one processor."""
FINISHERS = 5
"""Blocks that add up what was found of one tensor: four of them a quarter of its sketch each."""
MOST_FINISHED = 64
"""Tensors that one launch of `finish` takes."""

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
"""Rows of 16-bit floats that arrive together, and the shared memory they arrive in. With much in flight some processors
run far ahead of others; in a great tensor that evens out, and fewer waits count more."""

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
"""What the kernels are made of."""


class Device(NamedTuple):
    """What must be known of a GPU."""

    number: int
    capability: tuple[int, int]
    processors: int
    toolkit: str
    """The CUDA version of the framework."""


class Variant(NamedTuple):
    """What a kernel was compiled for."""

    dtype: str
    """Or "finish", of which there is one."""
    layout: int = 0
    great: bool = False
    most: int = 1
    """Tensors in a launch."""

    @property
    def name(self) -> str:
        """The kernel's, in its source."""
        return "finish" if self == FINISH else "summarize"


FINISH = Variant("finish")

_kernels: dict[tuple[Device, Variant], Kernel] = {}
_compiling = threading.Lock()


def compiled(device: Device, variant: Variant) -> Kernel:
    """Once in a process."""
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
    """What the source wants to know."""
    if variant == FINISH:
        return {"THREADS": _THREADS, "MOST": MOST_FINISHED, "BLOCKS": FINISHERS}
    rows, ring = _PARTS[variant.great]
    return {
        "ELEMENT": _ELEMENTS[variant.dtype],
        "THREADS": _THREADS,
        "LAYOUT": variant.layout,
        "MOST": variant.most,
        "BLOCKS_EACH": BLOCKS_EACH,
        "PART": rows,
        "RING": ring,
    }


def _source(name: str) -> str:
    folder = resources.files("tensortap.kernels") / "cuda"
    return "".join((folder / file).read_text() for file in FILES[name])
