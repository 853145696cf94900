"""Find the tensors of an .npy tree that were bfloat16 before they were saved as float32.

A bfloat16 value has zeros in the low 16 bits of its float32. A value that was computed in float32 has them by chance
once in 65,536 times. Small integers, masks and other fixed-point values have them too. So a layer counts as bfloat16
only if its tensors use the full precision of bfloat16 at several magnitudes, which no fixed-point grid does.

A float32 model may also hold values that were loaded from bfloat16, as in an embedding. So nothing is inferred where
these layers are few among all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Bfloat16Evidence"]

_LOW = np.uint32(0xFFFF)
_SIGN_OFF = np.uint32(0x7FFFFFFF)
_LAST_BIT = np.uint32(0x10000)
_INFINITY = np.uint32(0x7F800000)
_CHUNK = 1 << 20
_SAMPLE = 1 << 12
_CERTAIN = 16, 3
"""Number of values, and of exponents, that prove alone that a tensor was bfloat16."""
_LIKELY = 2, 2
"""The same, next to layers that are certain: a grid of 8 bits uses all of them at one exponent only."""
_LEAST_SHARE = 0.25

File = TypeVar("File", bound=Hashable)
Bits = npt.NDArray[np.uint32]


@dataclass
class _Layer(Generic[File]):
    """The tensors of one layer or parameter, over all micro steps."""

    files: list[File] = field(default_factory=list)
    values: Bits = field(default_factory=lambda: np.empty(0, np.uint32))
    """Different magnitudes that need the last bit of a bfloat16."""
    is_float32: bool = False
    """Whether any tensor has a value that is not a bfloat16."""


class Bfloat16Evidence(Generic[File]):
    """Collects float32 tensors, then decides which of them were bfloat16.

    >>> evidence = Bfloat16Evidence[str]()
    >>> evidence.add("fc1", "a.npy", np.float32([1.0, 0.0]))
    >>> evidence.files()
    set()
    """

    def __init__(self) -> None:
        self._layers: dict[Hashable, _Layer[File]] = defaultdict(_Layer)

    def add(self, layer: Hashable, file: File, array: npt.NDArray[Any]) -> None:
        """Examine one float32 tensor. An array that is mapped from its file is read only as far as needed."""
        known = self._layers[layer]
        bits = array.reshape(-1, order="A").view(np.uint32)
        if known.is_float32 or not _is_exact(bits):
            known.is_float32 = True
            return
        known.files.append(file)
        sample = bits[:: max(1, bits.size // _SAMPLE)] & _SIGN_OFF
        full = sample[((sample & _LAST_BIT) != 0) & (sample < _INFINITY)]
        known.values = np.union1d(known.values, full)[:_SAMPLE]

    def files(self) -> set[File]:
        """Return the files whose tensors were certainly bfloat16."""
        layers = self._layers.values()
        exact = [layer for layer in layers if not layer.is_float32]
        if len(exact) == len(self._layers):  # then tensors with too little evidence count like all others
            chosen = exact if _has(_CERTAIN, *(layer.values for layer in exact)) else []
        else:
            certain = [layer for layer in exact if _has(_CERTAIN, layer.values)]
            enough = len(certain) >= _LEAST_SHARE * (len(certain) + len(self._layers) - len(exact))
            chosen = [layer for layer in exact if _has(_LIKELY, layer.values)] if certain and enough else []
        return {file for layer in chosen for file in layer.files}


def _is_exact(bits: Bits) -> bool:
    head = min(_SAMPLE, bits.size)  # decides nearly always
    parts = [bits[:head], *(bits[at : at + _CHUNK] for at in range(head, bits.size, _CHUNK))]
    return not any(np.bitwise_and(part, _LOW).any() for part in parts)


def _has(least: tuple[int, int], *values: Bits) -> bool:
    pooled = np.unique(np.concatenate([np.empty(0, np.uint32), *values]))
    return len(pooled) >= least[0] and len(np.unique(pooled >> np.uint32(23))) >= least[1]
